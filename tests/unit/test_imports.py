"""The order of rooms: imports run one way, downwards, and no two files import each other."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import vllm_kvevict
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import TABLE
from vllm_kvevict.policies.registry import build_policy

PACKAGE = Path(vllm_kvevict.__file__).parent

FLOORS = (
    {"__main__", "tools"},
    {"calibrate"},
    {"worker"},
    {"engine", "serving"},
    {"attention", "metrics", "policies", "stores"},
    {"cache", "config"},
    {"ops", "rules", "compat", "processes"},
)
"""Rooms from top to bottom: commands, the calibration of a model, and the core's five floors. A
room imports itself and rooms of lower floors, none of its own floor."""


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module_of(file: Path, package: Path) -> str:
    parts = (package.name, *file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, wherever in the file."""
    files = {module_of(file, package): file for file in package.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        found[module] = set()
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module} has a relative import"
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files else str(node.module) for name in inner]
            else:
                continue
            found[module].update(name for name in names if name.split(".")[0] == package.name)
        assert found[module] <= files.keys(), f"{module} imports what is not there"
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports that break the order. The package itself (its version) belongs to no room."""
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if room(module) != room(other)
        and room(other)
        and (not room(module) or floor[room(other)] <= floor[room(module)])
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_a_floor():
    rooms = {room(module) for module in imports(PACKAGE)} - {""}
    assert sorted(rooms) == sorted(name for floor in FLOORS for name in floor)


def test_imports_run_downwards():
    assert upward(imports(PACKAGE)) == []


def test_no_file_imports_itself_through_others():
    assert circle(imports(PACKAGE)) == []


def test_policies_and_extensions_of_attention_are_found_by_name_alone():
    """Except policies that have CUDA kernels, which know them."""
    graph = imports(PACKAGE)
    needs = [build_policy(EvictionConfig(policy=name)).requirements for name in TABLE]
    named = {entry.module for entry in TABLE.values()}
    named |= {need.attention.split(":")[0] for need in needs if need.attention}
    named -= graph["vllm_kvevict.policies.kernels"]
    assert len(named) == 9
    assert [module for module, others in graph.items() if others & named] == []


def test_optional_kernels_are_reached_by_the_registry_alone():
    folder = "vllm_kvevict.attention.xformers"
    users = [
        module
        for module, others in imports(PACKAGE).items()
        if not module.startswith(folder) and any(other.startswith(folder) for other in others)
    ]
    assert users == []


def test_the_package_runs_without_the_rest_of_the_repository():
    rest = {"dev", "tests", "benchmarks", "deploy"}
    files = PACKAGE.rglob("*.py")
    assert not [file.name for file in files if rest & packages(tree(file))]


def test_benchmarks_run_without_the_tests():
    """Tests import benchmarks; what both need stands there."""
    files = (PACKAGE.parent / "benchmarks").rglob("*.py")
    found = {file.name for file in files if {"tests"} & packages(tree(file))}
    assert not found


def packages(module: ast.Module) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


def test_an_import_upwards_and_a_circle_are_found(tmp_path):
    """Also inside functions and where only types are checked."""
    package = tmp_path / "house"
    (package / "ops").mkdir(parents=True)
    (package / "worker").mkdir()
    for name in ("__init__.py", "ops/__init__.py", "worker/__init__.py"):
        (package / name).write_text("")
    (package / "ops" / "low.py").write_text("def f():\n    from house.worker import high\n")
    (package / "worker" / "high.py").write_text("if False:\n    import house.ops.low\n")
    graph = imports(package)
    assert upward(graph) == ["house.ops.low imports house.worker.high"]
    assert set(circle(graph)) == {"house.ops.low", "house.worker.high"}
