"""What a vLLM defines, read from its source: nothing of it is imported or run."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

Names = dict[str, tuple[ast.stmt, ast.alias | None]]


class Source:
    """The Python files of one vLLM.

    Args:
        root: The folder ``vllm``.

    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, module: str, name: str, parameters: Sequence[str] = ()) -> bool:
        """Whether ``module`` defines, inherits or imports a name.

        Args:
            module: Dotted, from ``vllm`` on.
            name: Of the module (``Request``) or of a class in it (``Request.num_tokens``); an
                attribute counts that a method assigns to ``self``.
            parameters: Names that the function takes; one with ``**`` takes all.

        """
        first, *rest = name.split(".")
        found = self._top(module, first)
        if found is None:
            return False
        where, definition = found
        for member in rest:
            if not isinstance(definition, ast.ClassDef):
                return False
            inside = self._member(where, definition, member)
            if inside is None:
                return False
            where, definition = inside
        return not parameters or _takes(definition, parameters)

    def _top(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """A name of a module and the module that defines it, through re-exports."""
        names = self._names(module)
        if name not in names:
            return self._starred(module, name)
        statement, alias = names[name]
        if isinstance(statement, ast.ImportFrom) and alias is not None:
            source = _absolute(module, statement, self._is_package(module))
            if source.split(".")[0] != "vllm":
                return module, statement
            inner = self._top(source, alias.name)
            if inner is None and self._file(f"{source}.{alias.name}") is not None:
                return module, statement
            return inner
        return module, statement

    def _starred(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        for statement, alias in self._names(module).values():
            if isinstance(statement, ast.ImportFrom) and alias is not None and alias.name == "*":
                source = _absolute(module, statement, self._is_package(module))
                found = self._top(source, name) if source.startswith("vllm.") else None
                if found is not None:
                    return found
        return None

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.stmt] | None:
        for statement in _flat(owner.body):
            if name in _bound(statement):
                return module, statement
        if name in _assigned_to_self(owner):
            return module, owner
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._top(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self._member(found[0], found[1], name)
                if inherited is not None:
                    return inherited
        return None

    def _names(self, module: str) -> "Names":
        file = self._file(module)
        return {} if file is None else _names_of(file.resolve())

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name == "__init__.py"


@cache
def _names_of(file: Path) -> Names:
    """What a module binds: the statement, and for an import the name it is imported as."""
    names: Names = {}
    for statement in _flat(ast.parse(file.read_text()).body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                key = alias.asname or alias.name
                key = f"* {statement.lineno}" if key == "*" else key
                names[key] = (statement, alias)
        for name in _bound(statement):
            names[name] = (statement, None)
    return names


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the branches in it, not of functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    return {node.id for node in _targets(statement) if isinstance(node, ast.Name)}


@cache
def _assigned_to_self(owner: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a class give ``self``."""
    found = set()
    waiting: list[ast.stmt] = [
        node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    while waiting:
        statement = waiting.pop()
        for field in ("body", "orelse", "finalbody"):
            waiting += getattr(statement, field, [])
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            waiting += part.body
        found |= {
            node.attr
            for node in _targets(statement)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return found


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    found: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        found = list(statement.targets)
    elif isinstance(statement, ast.AnnAssign):
        found = [statement.target]
    for target in found:
        if isinstance(target, ast.Tuple | ast.List):
            yield from target.elts
        else:
            yield target


def _takes(definition: ast.stmt, parameters: Sequence[str]) -> bool:
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    signature = definition.args
    named = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    return signature.kwarg is not None or {arg.arg for arg in named} >= set(parameters)


def _absolute(module: str, statement: ast.ImportFrom, package: bool) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - statement.level + package]
    return ".".join([*base, *([statement.module] if statement.module else [])])
