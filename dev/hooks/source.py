"""Reads what a vLLM defines from its source, without importing or running it."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

Names = dict[str, tuple[ast.stmt, ast.alias | None]]


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """Where a name is defined: the module, and the statement that defines, assigns or imports."""

    module: str
    statement: ast.stmt


class Source:
    """The Python files of one vLLM.

    Args:
        root: The folder ``vllm``.

    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, module: str, name: str, parameters: Sequence[str] = ()) -> bool:
        """Return True if ``module`` defines, inherits or imports a name.

        Args:
            module: Dotted, from ``vllm`` on.
            name: Of the module (``Request``) or of a class in it (``Request.num_tokens``); an
                attribute counts that a method assigns to ``self``.
            parameters: Names that the function takes; one with ``**`` takes all.

        """
        found = self.find(module, name)
        return found is not None and (not parameters or _takes(found.statement, parameters))

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of a name, as :meth:`has` looks for it; None where there is none."""
        first, *rest = name.split(".")
        found = self._top(module, first)
        for member in rest:
            if found is None or not isinstance(found.statement, ast.ClassDef):
                return None
            found = self._member(found.module, found.statement, member)
        return found

    def place(self, found: Definition) -> str:
        """File below the folder ``vllm`` and line, as ``v1/request.py:77``."""
        file = self._file(found.module)
        assert file is not None
        return f"{file.relative_to(self.root)}:{found.statement.lineno}"

    def abstract(self, module: str, name: str) -> set[str]:
        """Methods that a class leaves to its subclasses."""
        found, names = self.find(module, name), set[str]()
        if found is None or not isinstance(found.statement, ast.ClassDef):
            return names
        for base in self._bases(*found):
            names |= self.abstract(base.module, base.statement.name)  # type: ignore[attr-defined]
        for statement in found.statement.body:
            if isinstance(statement, Function):
                marks = {ast.unparse(mark).rpartition(".")[2] for mark in statement.decorator_list}
                (names.add if "abstractmethod" in marks else names.discard)(statement.name)
        return names

    @property
    def version(self) -> str:
        """Version of the vLLM without a local part; empty if the source has none."""
        file = self._file("vllm._version")
        said = re.search(r"__version__ = .*'([\d.]+\w*)", file.read_text()) if file else None
        return said[1] if said else ""

    def _top(self, module: str, name: str) -> Definition | None:
        """A name of a module and the module that defines it, through re-exports."""
        names = self._names(module)
        if name not in names:
            return self._starred(module, name)
        statement, alias = names[name]
        if isinstance(statement, ast.ImportFrom) and alias is not None:
            source = _absolute(module, statement, self._is_package(module))
            if source.split(".")[0] != "vllm":
                return Definition(module, statement)
            inner = self._top(source, alias.name)
            if inner is None and self._file(f"{source}.{alias.name}") is not None:
                return Definition(module, statement)
            return inner
        return Definition(module, statement)

    def _starred(self, module: str, name: str) -> Definition | None:
        for statement, alias in self._names(module).values():
            if isinstance(statement, ast.ImportFrom) and alias is not None and alias.name == "*":
                source = _absolute(module, statement, self._is_package(module))
                found = self._top(source, name) if source.startswith("vllm.") else None
                if found is not None:
                    return found
        return None

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> Definition | None:
        for statement in _flat(owner.body):
            if name in _bound(statement):
                return Definition(module, statement)
        if (assigned := _assigned_to_self(owner).get(name)) is not None:
            return Definition(module, assigned)
        for base in self._bases(module, owner):
            inherited = self._member(base.module, base.statement, name)  # type: ignore[arg-type]
            if inherited is not None:
                return inherited
        return None

    def _bases(self, module: str, owner: ast.stmt) -> Iterator[Definition]:
        """The classes of vLLM's that a class names as its bases."""
        for base in owner.bases if isinstance(owner, ast.ClassDef) else ():
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._top(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.statement, ast.ClassDef):
                yield found

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
    """Return what a module binds: the statement, and for an import its name."""
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
    if isinstance(statement, ast.ClassDef | Function):
        return {statement.name}
    return {node.id for node in _targets(statement) if isinstance(node, ast.Name)}


@cache
def _assigned_to_self(owner: ast.ClassDef) -> dict[str, ast.stmt]:
    """Attributes that the methods of a class give ``self``, and where first."""
    found: dict[str, ast.stmt] = {}
    waiting: list[ast.stmt] = [node for node in owner.body if isinstance(node, Function)]
    while waiting:
        statement = waiting.pop()
        for field in ("body", "orelse", "finalbody"):
            waiting += getattr(statement, field, [])
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            waiting += part.body
        for node in _targets(statement):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                first = found.setdefault(node.attr, statement)
                found[node.attr] = min(first, statement, key=lambda one: one.lineno)
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
    if not isinstance(definition, Function):
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
