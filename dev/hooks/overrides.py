"""Finds arguments that vLLM passes to our overrides and that these do not accept."""

import ast
from functools import cache
from pathlib import Path

from dev.hooks.source import Function, Source

OURS = Path(__file__).parents[2] / "vllm_kvevict"


def unmet(source: Source, user: str, module: str, name: str) -> list[str]:
    """Return what our override of a name lacks.

    Every function in our file that is called as the name's last part counts as an override, be it
    a method or one that replaces a method of an instance.

    Args:
        source: The vLLM.
        user: Our file, below the package.
        module: vLLM's, dotted.
        name: Of the module, or of a class in it.

    Returns:
        Parameters that no function of ours takes by place or by name, and abstract methods of a
        class that our subclass does not define.

    """
    owner, _, member = name.partition(".")
    found = source.find(module, name)
    functions, classes = _of(OURS / user)
    lacking = set[str]()
    if found is not None and isinstance(found.statement, Function):
        for function in functions.get(member or owner, ()):
            lacking |= _not_taken(function, found.statement)
    for made in classes.get(owner, ()):
        own = {one.name for one in made.body if isinstance(one, Function)}
        lacking |= {f"{missing}()" for missing in source.abstract(module, owner) - own}
    return sorted(lacking)


@cache
def _of(file: Path) -> tuple[dict[str, list[Function]], dict[str, list[ast.ClassDef]]]:
    """A file's functions by name, but for dunder ones, and its classes with one base, by that."""
    functions: dict[str, list[Function]] = {}
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, Function) and not node.name.startswith("__"):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef) and len(node.bases) == 1:
            classes.setdefault(ast.unparse(node.bases[0]), []).append(node)
    return functions, classes


def _not_taken(ours: Function, theirs: Function) -> set[str]:
    """Names of their parameters that ours takes neither by place nor by name."""
    places, names = _parameters(ours), {arg.arg for arg in ours.args.kwonlyargs}
    if ours.args.kwarg is not None:
        return set()
    known = names | set(places)
    later = set() if ours.args.vararg is not None else set(_parameters(theirs)[len(places) :])
    return (later | {arg.arg for arg in theirs.args.kwonlyargs}) - known


def _parameters(function: Function) -> list[str]:
    """Those that may be given by place, but for ``self``."""
    named = [*function.args.posonlyargs, *function.args.args]
    return [arg.arg for arg in named if arg.arg not in ("self", "cls")]
