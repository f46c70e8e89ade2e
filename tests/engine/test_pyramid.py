"""Layers with budgets of their own: blocks of every group, with vLLM's real schedulers.

Four groups of one layer, blocks of 8, window 8, budget 168: 160 tokens beside the window, 20
blocks. At a beta of 4 the layers keep 280, 200, 120 and 40 tokens of a long prompt.
"""

from dataclasses import replace

import pytest
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from tests.engine.harness import Engine, Setup, eviction_config, vllm_config
from tests.engine.test_scheduler import counters, engine, evictions, tokens
from tests.engine.test_spec import FULL
from vllm_kvevict.engine.registration import register_spec
from vllm_kvevict.engine.spec import EvictableAttentionSpec
from vllm_kvevict.schedule.layers import cut, padding
from vllm_kvevict.schedule.step_plan import PLAN

PYRAMID = Setup(budget=168, interval=64, pyramid=4, beta=4.0, blocks=640, max_batched=512)
SNAPKV = {"kv_eviction": "snapkv"}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def stores(output) -> list[dict[int, int]]:
    """Blocks of every store that the step fills, by group."""
    plan = getattr(output, PLAN, None)
    return [{g.group_id: len(g.store) for g in e.groups} for e in plan.evictions] if plan else []


def held(core: Engine, request) -> list[int]:
    """Blocks of a request by group."""
    return [
        sum(not block.is_null for block in manager.req_to_blocks[request.request_id])
        + len(manager.holdings[request.request_id].blocks)
        for manager in core.invariants.evicting
    ]


@BOTH
@pytest.mark.parametrize("chunk", [64, 512])
def test_blocks_follow_the_pyramid(asynchronous, chunk):
    setup = replace(PYRAMID, asynchronous=asynchronous, max_batched=chunk)
    core = engine(setup)
    request = core.add(tokens(400), 150)
    while not (found := stores(core.step())):
        pass
    assert found == [{0: 35, 1: 25, 2: 15, 3: 5}]
    core.settle()
    # The tail of 8 tokens from 392 on, and the block of the first token with async scheduling.
    assert [blocks - held(core, request)[3] for blocks in held(core, request)] == [30, 20, 10, 0]
    assert sum(found[0].values()) == 4 * 20, "what four layers of 20 blocks would hold"
    core.finish()
    assert counters(core).evictions_decode == 2 and counters(core).postponed == 0


@BOTH
def test_a_pyramid_holds_what_equal_layers_hold(asynchronous):
    setup = replace(PYRAMID, asynchronous=asynchronous, blocks=900)
    core = engine(setup)
    pyramid, flat = core.add(tokens(500), 90), core.add(tokens(500, 2), 90, asked=SNAPKV)
    while min(request.num_computed_tokens for request in (pyramid, flat)) < 580:
        core.step()
    core.settle()
    assert held(core, flat) == [held(core, flat)[0]] * 4
    assert sum(held(core, pyramid)) == sum(held(core, flat))
    assert counters(core).evictions == 4, "after prefill and once in decode"
    core.finish()


@BOTH
def test_shallow_layers_join_when_they_outgrow_what_they_keep(asynchronous):
    """Of 208 tokens 200 can go: 200, 173, 147 and 120 stay, so the shallowest layer keeps all."""
    core = engine(replace(PYRAMID, asynchronous=asynchronous))
    request = core.add(tokens(208), 150)
    seen = {}
    while core.scheduler.has_unfinished_requests():
        output = core.step()
        for found in stores(output):
            seen[evictions(output)[request.request_id]] = found
    late = {0: 25, 1: 21, 2: 18, 3: 15}
    assert seen == {208: {1: 21, 2: 18, 3: 15}, 272: late, 336: late}
    assert sum(late.values()) == 4 * 20 - 1
    core.finish()


@pytest.mark.parametrize("free, evicts", [(79, False), (80, True)])
def test_all_groups_evict_or_none(free, evicts):
    core = engine(PYRAMID)
    request = core.add(tokens(400), 100)
    while request.num_computed_tokens < 463:
        core.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - free)
    output = core.scheduler.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 1}
    assert stores(output) == ([{0: 35, 1: 25, 2: 15, 3: 5}] if evicts else [])
    assert counters(core).postponed == (not evicts)
    assert pool.get_num_free_blocks() == (0 if evicts else free)


@BOTH
@pytest.mark.parametrize("blocks, evicts", [(281, True), (280, False)])
def test_stores_of_all_groups_must_fit_beside_the_prompt(asynchronous, blocks, evicts):
    """50 blocks of prompt in each group, 80 of stores, and vLLM's null block."""
    core = engine(replace(PYRAMID, asynchronous=asynchronous, blocks=blocks))
    core.add(tokens(396), 10)
    assert len(stores(core.step())) == evicts
    core.finish()
    assert (counters(core).evictions, counters(core).postponed > 0) == (evicts, not evicts)


@BOTH
def test_a_hit_stops_before_the_window_and_covers_every_group(asynchronous):
    core = engine(replace(PYRAMID, asynchronous=asynchronous))
    core.add(tokens(404), 10)
    core.finish()
    core.add(tokens(404), 10)
    output = core.step()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [392]
    assert len(output.scheduled_new_reqs[0].block_ids) == 4
    core.finish()
    assert counters(core).evictions == 2 and counters(core).prefix_hits_capped == 1


def test_specs_of_different_depth_refuse_to_merge():
    timelines = eviction_config(PYRAMID).timelines(FULL.block_size, 4)
    specs = [EvictableAttentionSpec.of(FULL, timeline) for timeline in timelines]
    with pytest.raises(AssertionError, match="different eviction timelines"):
        EvictableAttentionSpec.merge(specs)
    resized = replace(specs[0], block_size=2 * FULL.block_size)
    assert resized.timeline.pyramid == timelines[0].pyramid


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 7, 9, 10, 11, 16, 22, 26, 32, 61])
@pytest.mark.parametrize("most", [2, 4, 6])
def test_groups_and_their_padding_are_vllms(layers, most):
    config = eviction_config(replace(PYRAMID, pyramid=most))
    timelines = config.timelines(FULL.block_size, layers)
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    register_spec()
    groups = get_kv_cache_groups(
        vllm_config(PYRAMID),
        {
            name: EvictableAttentionSpec.of(FULL, timeline)
            for name, timeline in zip(names, timelines, strict=True)
        },
    )
    size = max(len(group.layer_names) for group in groups)
    sizes = [len(part) for part in cut(layers, most)]
    assert len(groups) * size - layers == padding(sizes)
    for group in groups:
        found = {timelines[names.index(name)] for name in group.layer_names}
        assert found == {group.kv_cache_spec.timeline}
    if padding(sizes) == 0 and len(set(sizes)) == 1:
        assert sorted(names.index(group.layer_names[0]) for group in groups) == [
            part.start for part in cut(layers, most)
        ]
