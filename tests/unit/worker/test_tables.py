"""Memory that is left free of the KV cache for tables, and the memory of a start before."""

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
from vllm_kvevict.timeline.rule import EvictionRule
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
    timelines = [small, large, small, small]
    return {
        f"layer.{index}": EvictableAttentionSpec.from_spec(PLAIN, timeline)
        for index, timeline in enumerate(timelines)
    }


def vllm_config(caching: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, kv_cache_memory_bytes=None),
    )


def scratch() -> Scratch:
    return Scratch("triton", Shape(HEADS, 2, SIZE, BLOCK, REQUESTS, LENGTH), CPU)


@pytest.mark.parametrize("caching", [True, False])
def test_as_many_as_the_worker_makes(caching):
    made = 0
    for names in (["layer.0", "layer.2", "layer.3"], ["layer.1"]):
        timeline = layers()[names[0]].timeline
        slots = BLOCKS if caching else 0
        state = GroupState(0, names, timeline, HEADS, REQUESTS, LENGTH, CPU, slots)
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


@pytest.mark.parametrize(
    ("asked", "found", "whole"), [(None, None, False), (None, 10**9, False), (10**9, None, True)]
)
def test_what_is_left_of_the_memory(asked, found, whole, monkeypatch):
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
    left = 0 if whole else table_bytes(made.vllm_config, layers(), scratch(), 10**9)
    made._workspace, made.device = None, torch.device("cuda")
    with pretended(monkeypatch) as watch:
        made.memory = watch.memory
        assert made.determine_available_memory() == 10**9 - left
        held = 1000 + SMALL_COUNT * SMALL_BYTES
        assert made.held == held == watch.memory.live, "vLLM's profile contains it"
        made._workspace.open()
