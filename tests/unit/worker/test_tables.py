"""Memory that is left free of the KV cache for tables, and the memory of a start before."""

import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from tests.pretend_gpu import pretended
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.worker.gpu import EvictingWorker
from vllm_kvevict.worker.tables import table_bytes
from vllm_kvevict.worker.workspace import SMALL_BYTES, SMALL_COUNT

HEADS, SIZE, BLOCK, LENGTH, REQUESTS = 2, 64, 16, 4096, 8
CPU = torch.device("cpu")
PLAIN = FullAttentionSpec(
    block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
)
BLOCKS = 1000


def layers() -> dict[str, EvictableAttentionSpec]:
    """Three layers of one budget around one of another."""
    small, large = (EvictionRule(BLOCK, 8, 64, budget_tokens=tokens) for tokens in (72, 136))
    rules = [small, large, small, small]
    return {
        f"layer.{index}": EvictableAttentionSpec.from_spec(PLAIN, rule)
        for index, rule in enumerate(rules)
    }


def vllm_config(caching: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching, kv_cache_memory_bytes=None, num_gpu_blocks_override=None
        ),
    )


def scratch() -> Scratch:
    return Scratch("triton", Shape(HEADS, 2, SIZE, BLOCK, REQUESTS, LENGTH), CPU)


@pytest.mark.parametrize("caching", [True, False])
def test_as_many_as_the_worker_makes(caching):
    made = 0
    for names in (["layer.0", "layer.2", "layer.3"], ["layer.1"]):
        rule = layers()[names[0]].rule
        slots = BLOCKS if caching else 0
        state = GroupState(0, names, rule, HEADS, REQUESTS, LENGTH, CPU, slots)
        made += state.num_bytes + GroupBuffers(state, scratch(), CPU).num_bytes
    # vLLM lays the layers of one group over those of the other.
    available = BLOCKS * 3 * PLAIN.page_size_bytes
    assert table_bytes(vllm_config(caching), layers(), scratch(), available) == made > 0


class Sized(Worker):
    """vLLM's worker; it may find the memory that a start before has written down."""

    found: int | None = None

    def determine_available_memory(self):
        self.held = self.memory.live
        self.cache_config.kv_cache_memory_bytes = self.found or self.asked
        return self.found or self.asked or 10**9


class Evicts(EvictingWorker, Sized):
    pass


def evicting(monkeypatch, asked: int | None, found: int | None = None) -> Evicts:
    """A worker before vLLM sizes its cache, by the flag or by an earlier start."""
    made = Evicts.__new__(Evicts)
    made.vllm_config, made.asked, made.found = vllm_config(), asked, found
    made.scheduler_config, made.model_config = (
        made.vllm_config.scheduler_config,
        made.vllm_config.model_config,
    )
    made.cache_config = made.vllm_config.cache_config
    made.cache_config.kv_cache_memory_bytes = asked
    made.eviction_config = EvictionConfig(policy="ada-snapkv")
    made._evictable_layers, made._evictable_specs = list(layers()), list(layers().values())
    made._rings, made._scratch = None, scratch()
    monkeypatch.setattr(made, "_allocate_rings", lambda: None)
    monkeypatch.setattr(made, "_workspace_bytes", lambda: 1000)
    made._workspace, made.device = None, torch.device("cuda")
    return made


def have(monkeypatch, free: int, cached: int = 0, activations: int = 0) -> None:
    """The device has so many free bytes; torch holds some more that nothing uses."""
    numbers = dict(
        get_memory_info=(free, 2 * free),
        memory_allocated=7000,
        memory_reserved=7000 + cached,
        max_memory_allocated=7000 + activations,
        reset_peak_memory_stats=None,
    )
    for name, value in numbers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)


@pytest.mark.parametrize(
    ("asked", "found", "whole"), [(None, None, False), (None, 10**9, False), (10**9, None, True)]
)
def test_what_is_left_of_the_memory(asked, found, whole, monkeypatch):
    made = evicting(monkeypatch, asked, found)
    have(monkeypatch, 2 * 10**9)
    left = 0 if whole else table_bytes(made.vllm_config, layers(), scratch(), 10**9)
    with pretended(monkeypatch) as watch:
        made.memory = watch.memory
        assert made.determine_available_memory() == 10**9 - left
        held = 1000 + SMALL_COUNT * SMALL_BYTES
        assert made.held == held == watch.memory.live, "vLLM's profile contains it"
        made._workspace.open()


EXTRA = table_bytes(vllm_config(), layers(), scratch(), 10**9)


def sized(monkeypatch, made: Evicts) -> int:
    with pretended(monkeypatch) as watch:
        made.memory = watch.memory
        return made.determine_available_memory()


@pytest.fixture
def caplog_vllm(monkeypatch, caplog):
    """The records of vLLM's logger, which does not pass them on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", logger="vllm")
    return caplog


def messages(caplog) -> list[tuple[str, str]]:
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    return [one for one in said if "kv-cache-memory-bytes" in one[1]]


def test_the_bytes_in_addition_to_the_flag_are_named(monkeypatch, caplog_vllm):
    have(monkeypatch, 2 * 10**9)
    assert sized(monkeypatch, evicting(monkeypatch, 10**9)) == 10**9
    ((level, text),) = messages(caplog_vllm)
    assert level == "INFO" and f"takes {EXTRA} bytes for tables and 0 bytes for attention" in text
    assert "(1000000000)" in text and "the 2000000000 bytes that are free" in text


@pytest.mark.parametrize("cached", [0, 4096])
def test_a_cache_that_leaves_no_room_for_the_tables_is_refused(cached, monkeypatch, caplog_vllm):
    """What torch holds and nothing uses counts as free."""
    enough = 10**9 + EXTRA - cached
    have(monkeypatch, enough, cached)
    assert sized(monkeypatch, evicting(monkeypatch, 10**9)) == 10**9
    have(monkeypatch, enough - 1, cached)
    said = f"needs {EXTRA} bytes in addition .* {10**9 + EXTRA - 1} bytes are free: .* {10**9 - 1},"
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes 1000000000 .* {said}"):
        sized(monkeypatch, evicting(monkeypatch, 10**9))
    overridden = evicting(monkeypatch, 10**9)
    overridden.cache_config.num_gpu_blocks_override = 5
    assert sized(monkeypatch, overridden) == 10**9, "the cache is smaller than the flag says"


def test_room_for_activations_is_a_warning(monkeypatch, caplog_vllm):
    have(monkeypatch, 10**9 + EXTRA + 500, activations=500)
    sized(monkeypatch, evicting(monkeypatch, 10**9))
    assert [level for level, _ in messages(caplog_vllm)] == ["INFO"]
    have(monkeypatch, 10**9 + EXTRA + 500, activations=501)
    sized(monkeypatch, evicting(monkeypatch, 10**9))
    level, text = messages(caplog_vllm)[-1]
    assert level == "WARNING" and "leave 500 bytes for activations" in text
    assert "needs 501; lower the flag by 1 bytes" in text
