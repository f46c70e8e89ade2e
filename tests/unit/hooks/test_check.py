"""The check of vLLM's source, with a vLLM from which one hook was taken."""

import ast
import re
from pathlib import Path

import pytest
import vllm

import vllm_kvevict
from dev.hooks.check import missing
from dev.hooks.listing import HOOKS
from dev.hooks.source import Source
from tests.nightly import nightly

ROOT = Path(vllm.__file__).parent
OURS = Path(vllm_kvevict.__file__).parent
DOCS = OURS.parent / "docs" / "dev" / "vllm-hooks.md"
SOURCES = OURS.parent / ".cache" / "vllm-source"
"""What `make vllm-source` unpacks: one folder a version."""

TAKEN = [
    ("v1/core/sched/scheduler.py", "_get_local_prefix_cache_hit", "Scheduler"),
    nightly("v1/core/sched/scheduler.py", "need_mamba_block_aligned_split", "Scheduler"),
    nightly("v1/core/kv_cache_coordinator.py", "group_block_sizes", "KVCacheCoordinator"),
    ("v1/attention/backend.py", "block_table_tensor", "CommonAttentionMetadata"),
    nightly("v1/worker/gpu_worker.py", "determine_available_memory", "Worker"),
    ("v1/engine/__init__.py", "resumable", "EngineCoreRequest"),
    nightly("config/parallel.py", "worker_cls", "ParallelConfig"),
]


@pytest.fixture
def without(tmp_path):
    """A tree of links to vLLM's files in which one name of one file is spelled differently."""

    def take(file: str, name: str) -> Path:
        tree = tmp_path / "vllm"
        links, folder = tree, ROOT
        for part in Path(file).parts:
            links.mkdir()
            for entry in folder.iterdir():
                if entry.name != part:
                    (links / entry.name).symlink_to(entry)
            links, folder = links / part, folder / part
        text = folder.read_text()
        links.write_text(re.sub(rf"\b{name}\b", f"{name}_renamed", text))
        return tree

    return take


@pytest.mark.parametrize("file, name, owner", TAKEN)
def test_names_the_missing_hook(without, file, name, owner):
    tree = without(file, name)
    found = missing(Source(tree))
    assert found and all(hook.name == f"{owner}.{name}" for hook in found)


def test_a_parameter_is_missed(without):
    tree = without("v1/metrics/loggers.py", "custom_stat_loggers")
    assert [hook.name for hook in missing(Source(tree))] == ["StatLoggerManager.__init__"]


def test_the_installed_vllm_has_every_hook():
    assert missing(Source(ROOT)) == []


def test_every_file_is_documented():
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}
    assert set(HOOKS) <= documented
    assert all((OURS / user).is_file() for user in HOOKS)


@pytest.mark.parametrize("version", ["0.33.0"])
def test_another_version_has_every_hook(version):
    root = SOURCES / version / "vllm"
    if not root.is_dir():
        pytest.skip(f"no source of vLLM {version} in {SOURCES}: `make vllm-source` fetches it")
    source = Source(root)
    assert missing(source) == []
    for file in sorted(OURS.rglob("*.py")):
        if file.stem == "vllm_0_32":
            continue
        for module, name in used(ast.parse(file.read_text())):
            known = source.has(module, name) or source._file(f"{module}.{name}")
            assert known, f"{file.name} uses {module}.{name}"


def used(tree):
    """What is imported of vLLM, and which names of the modules among it are used, ``envs.NAME``."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module, alias.name
                if Source(ROOT)._file(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = modules.get(getattr(node.value, "id", None))
            if module is not None:
                yield module, node.attr
