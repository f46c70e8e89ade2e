"""Requests that never had their turn, or computed past it. Each case was found on a server.

Blocks of 8, window 8, budget 40: a store of 4 blocks, as in ``test_scheduler``.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import SpeculativeConfig

from benchmarks import bare_scheduler
from tests.engine.cases import BOTH, SYNC, engine, evictions, hit, tokens


@BOTH
@pytest.mark.parametrize("hogs", [1, 4])
def test_a_request_whose_windows_follow_one_another_lets_others_record(setup, hogs):
    """One request with ``kv_eviction_interval: 1``, or ``n: 64`` of them, and no other decodes on
    less: a user who asked for a budget holds all of a long answer, and the pool fills up.

    An interval is at least a block. With a window as long, the next window begins where the last
    ended, and the ring slot was given back when the request ended.
    """
    core = engine(replace(setup, rings=1, blocks=400, max_batched=512))
    others = [core.add(tokens(30, 10 + index), 300) for index in range(2)]
    for index in range(hogs):
        core.add(tokens(30, index), 300, asked={"kv_eviction_interval": 1})
    seen: Counter[str] = Counter()
    for _ in range(280):
        seen.update(evictions(core.step()).keys())
    assert sum(seen.values()) >= 20, "the slot is in use"
    assert min(seen[other.request_id] for other in others) >= 2, seen
    core.finish()


def with_drafts(drafts: int) -> Any:
    """The configuration of a server that drafts by n-grams."""
    make = bare_scheduler.vllm_config

    def vllm_config(setup: Any) -> Any:
        config = make(setup)
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        return config

    return vllm_config


@pytest.mark.parametrize("policy", ["snapkv", "streaming-llm"])
@pytest.mark.parametrize("length", [105, 113])
def test_padded_drafts_do_not_reach_across_the_next_eviction(policy, length, monkeypatch):
    """A user who repeats a prompt word by word gets an answer over other tokens than the first one.

    Where all of a prompt but one token is found, vLLM pads the step with drafts, which nobody had
    counted: they are rejected, and the step has evicted as if they were the request's.
    """
    setup = replace(SYNC, window=4, interval=16, max_batched=512)
    monkeypatch.setattr(bare_scheduler, "vllm_config", with_drafts(6))
    core = engine(setup)
    about = {"kv_eviction_at": 100, "kv_eviction": policy, "kv_eviction_interval": 16}
    core.add(tokens(length), 2, asked=about)
    core.schedule()
    core.settle()
    for _ in range(3):
        core.step()
    assert not core.scheduler.has_unfinished_requests()
    second = core.add(tokens(length), 100, asked=about)
    output = core.scheduler.schedule()
    start = hit(output, second)
    assert start >= 100
    due, end = 100 + 16, start + output.num_scheduled_tokens[second.request_id]
    # A rejected draft leaves its query in the ring: no step reaches from before the window into it.
    assert end <= due - setup.window or start >= due - setup.window, (start, end)
    assert end < due or start + 1 >= due, (start, end)
    assert not evictions(output) or end == length
