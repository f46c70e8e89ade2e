"""Names, and what ``ada-`` in front of one means."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import vllm_kvevict.policies
from vllm_kvevict.config import names
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICIES, POLICY_NAMES, PYRAMIDS, TABLE
from vllm_kvevict.config.policy_options import options_of
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.registry import build_policy

ADAPTIVE = [name for name, entry in TABLE.items() if entry.adaptive]


def ada(name: str) -> str:
    return "ada-pyramid" if name == "pyramidkv" else f"ada-{name}"


def build(name: str, **settings):
    return build_policy(EvictionConfig(policy=name, **settings))


def test_every_name_once_with_a_line_of_its_own():
    assert set(POLICY_NAMES) == set(TABLE) | {ada(name) for name in ADAPTIVE}
    assert {"pyramidkv", "ada-pyramid"} == PYRAMIDS
    summaries = [summary for _, summary in POLICIES.values()]
    assert len(set(summaries)) == len(summaries)
    assert all(summary and "\n" not in summary for summary in summaries)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_ada_changes_the_allocator_and_nothing_else(name):
    mine = {"pool_kernel": 3, "pool": "avg"} if "pool" in options_of(name) else {}
    plain, adaptive = build(name, options=mine), build(ada(name), options=mine | {"floor": 0.35})
    assert adaptive.scorer == plain.scorer.per_head()
    assert (plain.allocator, adaptive.allocator) == (Uniform(), Adaptive(0.35))
    assert (plain.name, adaptive.name) == (name, ada(name))
    assert plain.requirements == adaptive.requirements


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ADAPTIVE])
def test_heads_that_do_not_compare_share_no_budget(name):
    assert build(name).allocator == Uniform()
    with pytest.raises(ValueError, match=f"unknown policy 'ada-{name}'; choose from ada-snapkv"):
        EvictionConfig(policy=f"ada-{name}")


def test_a_policy_is_one_file_and_one_line(monkeypatch):
    """Every file beside the contract is a line of the table, and a new line is all it takes."""
    folder = Path(vllm_kvevict.policies.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    policies = files - {"base", "allocators", "registry", "requirements", "kernels", "state"}
    shelf = {f"vllm_kvevict.policies.{name}" for name in policies}
    assert shelf == {entry.module for entry in TABLE.values()}
    monkeypatch.setitem(TABLE, "mine", names.Entry("vllm_kvevict.policies.snapkv", "mine", True))
    added = set(names._names()) - set(POLICY_NAMES)
    assert added == {"mine", "ada-mine"}


def test_reading_the_names_imports_no_torch():
    code = "import sys, vllm_kvevict.config.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", TABLE)
def test_modules_exist(name):
    assert callable(import_module(TABLE[name].module).build)
