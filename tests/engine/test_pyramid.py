"""Layers with budgets of their own: blocks of every group, with vLLM's real schedulers.

Four groups of one layer, blocks of 8, window 8, budget 168: 160 tokens beside the window, 20
blocks. At a beta of 4 the layers keep 280, 200, 120 and 40 tokens of a long prompt.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import counters, engine, evictions, tokens
from tests.engine.harness import Engine, Setup, eviction_config, layer_shares, vllm_config
from tests.engine.test_spec import FULL, get_kv_cache_groups
from tests.engine.views import holdings
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.engine.blocks import register_spec
from vllm_kvevict.rules.layers import group_layers, padding, pyramid
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import PLAN

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
        + len(holdings(manager)[request.request_id].blocks)
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
    """Of 208 tokens 200 can go: 200, 173, 147 and 120 stay, so the shallowest layer keeps all.

    That is 25, 21.7, 18.3 and 15 blocks, of which the largest remainder is rounded up.
    """
    core = engine(replace(PYRAMID, asynchronous=asynchronous))
    request = core.add(tokens(208), 150)
    seen = {}
    while core.scheduler.has_unfinished_requests():
        output = core.step()
        for found in stores(output):
            seen[evictions(output)[request.request_id]] = found
    late = {0: 25, 1: 22, 2: 18, 3: 15}
    assert seen == {208: {1: 22, 2: 18, 3: 15}, 272: late, 336: late}
    assert sum(late.values()) == 4 * 20
    core.finish()


@pytest.mark.parametrize("free, in_place", [(0, 4), (9, 3), (84, 0)])
def test_groups_without_room_evict_in_place(free, in_place):
    """Five blocks of store for the deepest group, and one more for each, fit where nine are."""
    core = engine(PYRAMID)
    request = core.add(tokens(400), 100)
    while request.num_computed_tokens < 463:
        core.step()
    core.hold(free)
    output = core.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 1}
    assert stores(output) == [{0: 35, 1: 25, 2: 15, 3: 5}]
    assert (counters(core).evictions_in_place, counters(core).postponed) == (in_place, 0)


@BOTH
def test_a_prompt_that_fills_the_pool_evicts_in_every_group(asynchronous):
    """50 blocks of prompt in each group, and vLLM's null block."""
    core = engine(replace(PYRAMID, asynchronous=asynchronous, blocks=201))
    core.add(tokens(396), 4)
    assert len(stores(core.step())) == 1
    core.finish()
    assert (counters(core).evictions_in_place, counters(core).postponed) == (4, 0)


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
    rules = eviction_config(PYRAMID).layer_rules(FULL.block_size, 4)
    specs = [EvictableAttentionSpec.from_spec(FULL, rule) for rule in rules]
    with pytest.raises(AssertionError, match="different eviction rules"):
        EvictableAttentionSpec.merge(specs)
    resized = replace(specs[0], block_size=2 * FULL.block_size)
    assert resized.rule.share == rules[0].share


def vllms_groups(config: EvictionConfig, layers: int) -> list[tuple[list[int], EvictionRule]]:
    """The layers of each KV-cache group that vLLM makes, and the group's rule."""
    rules = config.layer_rules(FULL.block_size, layers)
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    register_spec()
    groups = get_kv_cache_groups(
        vllm_config(PYRAMID),
        {
            name: EvictableAttentionSpec.from_spec(FULL, rule)
            for name, rule in zip(names, rules, strict=True)
        },
    )
    found = []
    for group in groups:
        mine = [names.index(name) for name in group.layer_names]
        assert {rules[layer] for layer in mine} == {group.kv_cache_spec.rule}
        found.append((mine, group.kv_cache_spec.rule))
    assert sorted(layer for mine, _ in found for layer in mine) == list(range(layers))
    return found


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 7, 9, 10, 11, 16, 22, 26, 32, 61])
@pytest.mark.parametrize("most", [2, 4, 6])
def test_groups_and_their_padding_are_vllms(layers, most):
    groups = vllms_groups(eviction_config(replace(PYRAMID, pyramid=most)), layers)
    size = max(len(mine) for mine, _ in groups)
    expected = group_layers(pyramid(layers, PYRAMID.beta), most)
    sizes = [len(part) for part in expected]
    assert len(groups) * size - layers == padding(sizes)
    if padding(sizes) == 0 and len(set(sizes)) == 1:
        assert [tuple(mine) for mine, _ in groups] == expected


def test_vllm_groups_layers_that_are_not_neighbours():
    config = EvictionConfig(
        policy="ada-snapkv",
        profile=layer_shares((0.3, 1.5, 0.4, 1.6, 0.2, 2.0)),
        options=dict(groups=2),
    )
    groups = vllms_groups(config, 6)
    assert [(mine, rule.share.value) for mine, rule in groups] == [
        ([0, 2, 4], pytest.approx(0.3)), ([1, 3, 5], pytest.approx(1.7)),
    ]  # fmt: skip


SHARES = replace(PYRAMID, shares=(2.0, 1.5, 0.4, 0.1))


@BOTH
@pytest.mark.parametrize("asked, evicts", [(None, 1), ({"kv_eviction": "streaming-llm"}, 1)])
def test_blocks_follow_measured_shares(asynchronous, asked, evicts):
    """20 blocks a layer on average; under streaming-llm layers do not compare, and are alike."""
    core = engine(replace(SHARES, asynchronous=asynchronous))
    core.add(tokens(400), 10, asked=asked)
    while not (found := stores(core.step())):
        pass
    assert found == [{0: 20, 1: 20, 2: 20, 3: 20} if asked else {0: 40, 1: 30, 2: 8, 3: 2}]
    core.finish()
    assert counters(core).evictions == evicts


def test_preempted_with_measured_shares():
    """More prompts than the pool holds: all finish, every store as large as its share says."""
    core = engine(replace(SHARES, blocks=400, budget=72, interval=128, reserve_full=False))
    for seed in range(6):
        core.add(tokens(120, seed), 300)
    core.finish()
    assert core.invariants.tally.preemptions > 0 and counters(core).evictions_decode > 0
