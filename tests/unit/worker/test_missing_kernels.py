"""A GPU host with a wheel that holds no kernels says so, once a machine, and how to mend it."""

import logging
from types import SimpleNamespace

import pytest
from vllm import logger as vllm_logger
from vllm.distributed import parallel_state

from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.worker.gpu import EvictingWorker


@pytest.fixture
def plain_install(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(extension, "LIBRARY", tmp_path / "_C.abi3.so")
    vllm_logger._print_warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm.kv_eviction.worker")


def start(rank: int, monkeypatch) -> None:
    """What a rank does before its first step, as far as the kernels go."""
    monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(local_rank=rank))
    worker = object.__new__(EvictingWorker)
    worker._rings = object()
    assert worker._fused({}, {}, None, None) is None


def test_one_line_a_machine(plain_install, monkeypatch, caplog):
    for rank in (0, 1, 2):
        start(rank, monkeypatch)
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING"
    assert "slower" in said and "no CUDA kernels" in said and "make wheel" in said


def test_policies_that_score_without_queries_have_no_kernels_to_miss(plain_install, caplog):
    worker = object.__new__(EvictingWorker)
    worker._rings = None
    assert worker._fused({}, {}, None, None) is None
    assert not caplog.records
