"""Prompts that evict as they stream in, in vLLM's own schedulers.

Blocks of 8, window 8, budget 40: a store of 4 blocks. At an interval of 32 prompts evict at
72, 104, 136 and so on, and hold at most 4 + 1 + 4 blocks.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import (
    ASYNC,
    BOTH,
    SYNC,
    counters,
    engine,
    hit,
    tokens,
    used_blocks,
)
from tests.engine.harness import Engine, Setup, kv_cache_config, vllm_config
from tests.engine.test_own_settings import walk

INSIDE = dict(prefill_interval=32, longest=600, interval=32)


def streaming(setup: Setup, **changes) -> Engine:
    return engine(replace(setup, **(INSIDE | changes)))


@BOTH
@pytest.mark.parametrize("chunk", [7, 30, 64, 512])
@pytest.mark.parametrize(
    "prompt, expected",
    [
        (40, [72]),
        (48, [48, 80]),
        (70, [70, 102]),
        (160, [72, 104, 136, 160, 192]),
        (168, [72, 104, 136, 168, 200]),
        (170, [72, 104, 136, 168, 200]),
    ],
)
def test_evicts_every_interval_of_the_prompt_and_at_its_end(setup, chunk, prompt, expected):
    core = streaming(setup, max_batched=chunk)
    core.add(tokens(prompt), 34)
    assert walk(core) == expected
    assert counters(core).postponed == 0


@BOTH
def test_with_a_point_of_its_own(setup):
    core = streaming(setup, max_batched=512)
    core.add(tokens(170), 10, asked={"kv_eviction_at": 120})
    assert walk(core) == [72, 104, 120, 136, 168], "and not at the end of the prompt"


@BOTH
@pytest.mark.parametrize("reserve", [False, True])
def test_a_prompt_longer_than_the_pool(setup, reserve):
    core = streaming(setup, blocks=10 + 1, max_batched=512, reserve_full=reserve)
    request = core.add(tokens(500), 60)
    most = 0
    while core.scheduler.has_unfinished_requests():
        core.step()
        most = max(most, used_blocks(core))
    assert most <= 10 and request.num_output_tokens == 60
    assert core.invariants.tally.preemptions == 0
    assert counters(core).evictions_in_place > 10
    core.finish()


@BOTH
def test_many_prompts_longer_than_the_pool(setup):
    core = streaming(setup, blocks=24, max_batched=64)
    requests = [core.add(tokens(300 + 10 * i, i), 30) for i in range(8)]
    core.finish()
    assert all(request.num_output_tokens == 30 for request in requests)


def test_start_up_asks_for_what_one_request_holds():
    setup = replace(SYNC, **INSIDE)
    (group,) = kv_cache_config(setup).kv_cache_groups
    spec, config = group.kv_cache_spec, vllm_config(replace(setup, longest=100_000))
    blocks = spec.max_memory_usage_bytes(config) // spec.page_size_bytes
    assert blocks == 4 + 5 + 2
    core = streaming(ASYNC, blocks=blocks + 1, longest=100_000, max_batched=512)
    core.add(tokens(3000), 400)
    core.finish()
    assert core.invariants.tally.preemptions == 0
    whole = replace(setup, interval=0)
    (group,) = kv_cache_config(whole).kv_cache_groups
    spec = group.kv_cache_spec
    assert spec.max_memory_usage_bytes(config) == 12_500 * spec.page_size_bytes


@BOTH
def test_hits_end_before_the_first_point_and_its_store_is_shared(setup):
    core = streaming(setup, blocks=200, max_batched=512)
    prompt = tokens(300)
    first = core.add(prompt, 4)
    core.finish()
    assert counters(core).stores_published == 1
    again, other = core.add(prompt, 4), core.add(prompt[:100] + tokens(100, 3), 4)
    third = core.add(prompt[:60] + tokens(100, 4), 4)
    output = core.step()
    # The store of the first point, at 72, and what lies behind it up to the window of the next.
    assert hit(output, again) == hit(output, other) == 96
    assert hit(output, third) == 56
    core.finish()
    assert counters(core).stores_reused == 2 and first.num_output_tokens == 4


@BOTH
def test_a_preempted_prompt_evicts_at_the_same_places(setup):
    core = streaming(setup, max_batched=512)
    core.add(tokens(200), 40)
    for _ in range(12):
        core.step()
    core.settle()
    core.reset()
    assert walk(core)[:4] == [72, 104, 136, 168]
    assert core.invariants.tally.preemptions == 1


@BOTH
def test_no_slot_puts_an_eviction_off_to_the_end_of_a_chunk(setup):
    core = streaming(setup, rings=1, max_batched=512, max_num_seqs=3)
    for seed in range(3):
        core.add(tokens(300, seed), 20)
    core.finish()
    assert counters(core).postponed_ring > 0 and counters(core).evictions > 10


@BOTH
def test_groups_stop_together(setup):
    core = streaming(setup, pyramid=3, blocks=60, max_batched=512)
    core.add(tokens(300), 40)
    core.finish()
    assert counters(core).evictions_prefill >= 8
