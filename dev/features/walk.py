"""All that a vLLM can be asked for, read from its source: nothing of it is imported or run.

A name is ``Class.field`` of the configuration, the name of a method, ``METHOD /path`` of a route,
and the name of a request's class or of a field that any of these classes has.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from dev.hooks.source import Definition, Function, Source

Classes = Mapping[str, tuple[str, ...]]

CONFIG = ("vllm.config.vllm", "VllmConfig")

WORKERS = {
    "vllm.v1.worker.gpu_worker": ("Worker",),
    "vllm.v1.worker.cpu_worker": ("CPUWorker",),
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase",),
}

CORES = {"vllm.v1.engine.core": ("EngineCore", "EngineCoreProc", "DPEngineCoreProc")}

CLIENTS = {
    "vllm.engine.protocol": ("EngineClient",),
    "vllm.v1.engine.async_llm": ("AsyncLLM",),
    "vllm.entrypoints.llm": ("LLM",),
}

PARAMETERS = {
    "vllm.sampling_params": (
        "SamplingParams",
        "StructuredOutputsParams",
        "RepetitionDetectionParams",
        "BeamSearchParams",
    ),
    "vllm.v1.engine": ("EngineCoreRequest",),
}

VERBS = ("get", "post", "put", "patch", "delete", "head", "options", "websocket")
ADDERS = ("add_api_route", "add_route", "add_api_websocket_route", "add_websocket_route", "mount")


def config(source: Source) -> set[str]:
    """The fields of ``VllmConfig`` and of its parts, as ``Class.field``.

    Parts are classes that the annotation of a field names, and all of ``vllm.config``.
    """
    found, waiting = set[str](), [source.find(*CONFIG)]
    for file in sorted((source.root / "config").glob("*.py")):
        module = f"vllm.config.{file.stem}".removesuffix(".__init__")
        tree = _tree(file.resolve())
        classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
        waiting += [source.find(module, one.name) for one in classes if _is_config(one)]
    seen = set[tuple[str, str]]()
    while waiting:
        one = waiting.pop()
        if one is None or not isinstance(one.statement, ast.ClassDef):
            continue
        owner = one.statement
        if (one.module, owner.name) in seen or not _is_config(owner):
            continue
        seen.add((one.module, owner.name))
        waiting += source._bases(one.module, owner)
        for name, annotation in _fields(owner):
            found.add(f"{owner.name}.{name}")
            waiting += [source.find(one.module, word) for word in _words(annotation)]
    return found


def methods(source: Source, classes: Classes) -> set[str]:
    """The names of the public methods of some classes, inherited ones included."""
    found = [source.find(module, owner) for module, owners in classes.items() for owner in owners]
    return {name for one in found for name in _methods(source, one)}


def routes(source: Source) -> set[str]:
    """All routes that any server of vLLM may have, as ``METHOD /path``."""
    found = set[str]()
    for file in sorted((source.root / "entrypoints").rglob("*.py")):
        for node in ast.walk(_tree(file.resolve())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                found |= _routes_of(node.func.attr, node.args[0], node.keywords)
    return found


def requests(source: Source) -> set[str]:
    """The classes of requests, and the names of their fields and of sampling parameters."""
    found = set[str]()
    for file in sorted((source.root / "entrypoints").rglob("*.py")):
        parts = file.relative_to(source.root).with_suffix("").parts
        module = ".".join(("vllm", *parts)).removesuffix(".__init__")
        for one in _tree(file.resolve()).body:
            if isinstance(one, ast.ClassDef) and one.name.endswith("Request"):
                names = set(_inherited(source, Definition(module, one)))
                if names:
                    found |= {one.name, *names}
    for module, owners in PARAMETERS.items():
        for owner in owners:
            definition = source.find(module, owner)
            assert definition is not None, owner
            found |= {owner, *_inherited(source, definition)}
    return found


KINDS: dict[str, Callable[[Source], set[str]]] = {
    "config": config,
    "worker": lambda source: methods(source, WORKERS),
    "core": lambda source: methods(source, CORES),
    "client": lambda source: methods(source, CLIENTS),
    "route": routes,
    "request": requests,
}
"""The walks: fields of the configuration; methods of workers, which ``collective_rpc`` runs by
name, of engine cores, of which a utility call does, and of what a server or a script calls; routes;
requests."""


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _is_config(statement: ast.stmt) -> bool:
    marks = statement.decorator_list if isinstance(statement, ast.ClassDef) else []
    names = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in marks}
    return bool(names & {"config", "dataclass"})


def _fields(owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for one in owner.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if not ast.unparse(one.annotation).startswith("ClassVar"):
            yield one.target.id, one.annotation


def _words(annotation: ast.expr) -> Iterator[str]:
    """Names in an annotation, also in those that are strings."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                yield from _words(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                continue


def _methods(source: Source, found: Definition | None) -> Iterator[str]:
    """Names of public methods, inherited ones included."""
    assert found is not None and isinstance(found.statement, ast.ClassDef)
    for one in found.statement.body:
        if isinstance(one, Function) and not one.name.startswith("_"):
            yield one.name
    for base in source._bases(*found):
        yield from _methods(source, base)


def _inherited(source: Source, found: Definition) -> Iterator[str]:
    """Names of a class's fields, inherited ones included."""
    assert isinstance(found.statement, ast.ClassDef)
    for name, _ in _fields(found.statement):
        if not name.startswith("_") and name != "model_config":
            yield name
    for base in source._bases(*found):
        yield from _inherited(source, base)


def _routes_of(attribute: str, path: ast.expr, keywords: list[ast.keyword]) -> set[str]:
    """Return the route that a call of a router's method adds; computed paths as source."""
    constant = path.value if isinstance(path, ast.Constant) else None
    where = constant if isinstance(constant, str) else ast.unparse(path)
    if attribute in VERBS:
        return {f"{attribute.upper()} {where}"} if where.startswith("/") else set()
    if attribute not in ADDERS:
        return set()
    methods = [word.value for word in keywords if word.arg == "methods"]
    verbs = [ast.literal_eval(one) for one in methods if isinstance(one, ast.List)]
    return {f"{verb} {where}" for verb in (verbs[0] if verbs else [attribute])}
