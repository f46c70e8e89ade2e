"""What versions spell differently: the installed one's shim, and 0.33's with its planning."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import vllm
from vllm import envs

from vllm_kvevict.compat import shim, vllm_0_32, vllm_0_33
from vllm_kvevict.serving.support import REFUSALS


@pytest.mark.parametrize(
    "version, expected",
    [("0.32.0", vllm_0_32), ("0.32.1+cpu", vllm_0_32), ("0.33.0rc1", vllm_0_33)],
)
def test_the_file_of_a_version(monkeypatch, version, expected):
    monkeypatch.setattr(vllm, "__version__", version)
    assert shim() is expected


@pytest.mark.parametrize("given, chosen", [(False, 128), (True, 32)])
def test_blocks_of_the_cpu_build(given, chosen):
    cache = SimpleNamespace(block_size=32, user_specified_block_size=given)
    config = SimpleNamespace(cache_config=cache)
    vllm_0_32.choose_block_size(config)
    assert cache.block_size == 32
    vllm_0_33.choose_block_size(config)
    assert cache.block_size == chosen


@pytest.mark.parametrize("backend, refused", [("ray", True), ("mp", False)])
def test_rays_older_executor_is_asked_for_where_there_are_two(monkeypatch, backend, refused):
    """With the variable that chooses it taken from vLLM, as in 0.33."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
    (refusal,) = (one for one in REFUSALS if one.what == "vLLM's older Ray executor")
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setitem(envs.environment_variables, name, lambda: False)
    assert refusal.applies(config) == refused
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    monkeypatch.delitem(envs.environment_variables, name)
    assert not refusal.applies(config)


def test_planning_is_given_the_groups(monkeypatch):
    """With a stand-in for vLLM 0.33's module: groups are made of the specs and passed on."""
    planning = SimpleNamespace(
        get_global_kv_cache_groups=lambda config, specs: ["groups of", specs],
        get_kv_cache_configs=lambda *given: list(given),
    )
    name = "vllm.v1.core.kv_cache_planning"
    monkeypatch.setitem(sys.modules, name, planning)
    core = importlib.import_module("vllm.v1.core")
    monkeypatch.setattr(core, "kv_cache_planning", planning, raising=False)
    given = vllm_0_33.kv_cache_configs("config", ["specs"], [7])
    assert given == ["config", ["specs"], [7], ["groups of", ["specs"]]]
