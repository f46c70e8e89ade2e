"""A GPU without the CUDA kernels: refused at start-up, or slower with one line that says so."""

import logging
from types import SimpleNamespace

import pytest
from vllm import logger as vllm_logger
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from tests.unit.serving.configurations import assert_sentence
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.policies.kernels import has_kernels
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.serving import support
from vllm_kvevict.worker.gpu import EvictingWorker

OPTIONAL = EvictionConfig(policy="snapkv", kernels="optional")


@pytest.fixture
def plain_install(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(extension, "LIBRARY", tmp_path / "_C.abi3.so")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    vllm_logger._print_warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm.kv_eviction.worker")


def start(config: EvictionConfig, rank: int, monkeypatch) -> None:
    """What a rank does before its first step, as far as the kernels go."""
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(local_rank=rank))
    worker = object.__new__(EvictingWorker)
    worker._rings, worker.eviction_config = object(), config
    assert worker._fused({}, {}, None, None) is None


def test_one_line_a_machine(plain_install, monkeypatch, caplog):
    for rank in (0, 1, 2):
        start(OPTIONAL, rank, monkeypatch)
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING"
    assert "slower" in said and "no CUDA kernels" in said and "make wheel" in said


@pytest.mark.parametrize(
    "policy", [n for n in POLICY_NAMES if "h2o" not in n and "stream" not in n]
)
def test_policies_with_kernels_are_refused(policy, plain_install, monkeypatch, caplog):
    """Before the model loads, and by the worker, whose installation may be another one."""
    config = EvictionConfig(policy=policy)
    steps = [lambda: support._check_policies(config), lambda: start(config, 0, monkeypatch)]
    for step in steps:
        if not has_kernels(build_policies(config)[policy].scorer):
            assert policy in ("tova", "ada-tova", "scissorhands", "ada-scissorhands", "nacl",
                              "ada-nacl", "subgen")  # fmt: skip
            step()
            continue
        with pytest.raises(ValueError, match=f"does not support {policy} without") as caught:
            step()
        message = str(caught.value)
        assert_sentence(message.replace("--no-deps . builds", "--no-deps builds"))
        assert "KVEVICT_CUDA=1 pip install" in message
        assert "set --kv-eviction-kernels to optional" in message


def test_a_policy_that_requests_may_choose_is_refused_as_well(plain_install):
    with pytest.raises(ValueError, match="does not support defensive without"):
        support._check_policies(EvictionConfig(policy="tova", allow="defensive"))


def test_kernels_that_do_not_load_are_refused_by_the_worker(plain_install, monkeypatch):
    monkeypatch.setattr(extension, "obstacle", lambda: "the driver is too old")
    with pytest.raises(ValueError, match="longer: the driver is too old; set"):
        start(EvictionConfig(policy="snapkv"), 0, monkeypatch)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: False)
    start(EvictionConfig(policy="snapkv"), 0, monkeypatch)  # no build for AMD GPUs has kernels


def test_policies_that_score_without_queries_have_no_kernels_to_miss(plain_install, caplog):
    worker = object.__new__(EvictingWorker)
    worker._rings = None
    assert worker._fused({}, {}, None, None) is None
    assert not caplog.records
