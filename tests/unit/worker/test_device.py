"""The eviction pass makes every tensor where the cache is.

Under a default device on which nothing can be computed with the cache's tensors, a tensor made
without naming its device shows.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.gpu import interleaved
from vllm_kvevict.worker.probes import LayerProbe, Probes

BLOCK, HEADS, GROUP, SIZE, WINDOW = 16, 2, 3, 8, 4
NAMES = ["layer.0", "layer.1"]
CPU = torch.device("cpu")
ON_CUDA = [name for name in POLICY_NAMES if name not in ("h2o", "ada-h2o", "subgen-stream")]


def worker(policy: str) -> WorkerEviction:
    torch.manual_seed(0)
    config = EvictionConfig(policy=policy, window=WINDOW, budget=WINDOW + 2 * BLOCK)
    rule = EvictionRule(BLOCK, WINDOW, 2 * BLOCK, budget_tokens=WINDOW + 2 * BLOCK)
    state = GroupState(0, NAMES, rule, HEADS, 3, 512, CPU)
    layout = interleaved(BLOCK, SIZE)
    assert layout._views  # offsets are read on the host, once
    caches = {
        name: LayerCache(torch.randn(40 * HEADS, 2 * BLOCK * SIZE), layout, SIZE**-0.5, 0.0)
        for name in NAMES
    }
    rings = ObservationRings(NAMES, 2, WINDOW, HEADS * GROUP, SIZE, torch.float32, CPU)
    rings._queries.normal_()
    rows = SimpleNamespace(
        rows=lambda ids: np.array([1]),
        positions=lambda request_id, start, stop: torch.arange(start, stop, device=CPU),
    )
    values = TokenStats(caches, dict.fromkeys(NAMES, HEADS), 2)
    probe = LayerProbe(torch.randn(HEADS, 2, SIZE + 2), None, torch.rand(HEADS), None)
    prose = replace(probe, weights=torch.randn(HEADS, 2, SIZE + 2), age=torch.randn(HEADS, 2, 2))
    probe = replace(probe, prose=prose)
    made = WorkerEviction(
        build_policies(config), {0: state}, caches, rings, values, rows,
        probes=Probes(dict.fromkeys(NAMES, probe), caches, values),
    )  # fmt: skip
    if made._prompts is not None:
        made._prompts.digest = lambda request_id: 5
    return made


def evictions(policy: str) -> list[Eviction]:
    """After a prefill of 6 blocks and some tokens, then after 3 more blocks."""
    first = GroupEviction(
        group_id=0,
        old_tail_start=0,
        tail_start=96,
        old_store=[],
        store=[30, 31],
        positional=list(range(1, 8)),
    )
    later = GroupEviction(
        group_id=0,
        old_tail_start=96,
        tail_start=144,
        old_store=[30, 31],
        store=[32, 33],
        positional=[7, 8, 9, 10],
    )
    common = dict(request_id="a", ring=1, policy=policy, protect_first=2, share=0.15)
    return [
        Eviction(num_tokens=102, groups=(first,), **common),
        Eviction(num_tokens=150, groups=(later,), **common),
    ]


def same(one: WorkerEviction, other: WorkerEviction, **tolerance) -> None:
    """Both evicted the same, and wrote the same beside it."""
    assert one.evictions == other.evictions == 2
    assert torch.equal(one.states[0].head_indptr, other.states[0].head_indptr)
    for name in NAMES:
        pages = [each._caches[name].pages for each in (one, other)]
        torch.testing.assert_close(*pages, **tolerance)
        numbers = [each.token_stats.layer(name) for each in (one, other)]
        torch.testing.assert_close(*numbers, **tolerance)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("policy", ON_CUDA)
def test_no_tensor_is_made_elsewhere(policy):
    plain, watched = worker(policy), worker(policy)
    for eviction in evictions(policy):
        plain._evict(eviction)
        with torch.device("meta"):
            watched._evict(eviction)
    same(watched, plain, rtol=0, atol=0)
    for name in NAMES:
        assert bool(plain.token_stats.layer(name).any()) == policy.endswith(("defensive", "probe"))
    assert int(watched.states[0].tail_start[1]) == 144


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("policy", ["streaming-llm", "ada-snapkv"])
def test_keys_are_read_only_where_scores_need_them(policy, monkeypatch):
    made, read, keys = worker(policy), [], LayerCache.key_sequences

    def counted(cache, pages, *more):
        read.append(pages.numel())
        return keys(cache, pages, *more)

    monkeypatch.setattr(LayerCache, "key_sequences", counted)
    for eviction in evictions(policy):
        made._evict(eviction)
    assert made.evictions == 2 and bool(sum(read)) == (policy == "ada-snapkv")
