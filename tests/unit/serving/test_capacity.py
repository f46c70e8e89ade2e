"""Requests that would find no room in a KV cache smaller than the longest sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.platforms import current_platform

from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.serving.admission import check_request, refuse_session

SERVER = dict(policy="snapkv", budget=512, interval=64, prefill_interval=256, allow="none")
NEEDS = 15 + 9 + 2
"""Blocks of 32: the store, window and interval, and what rounding and a step in flight take."""


def engine(times: float | None = None, **settings: Any) -> Any:
    blocks = None if times is None else round(NEEDS * times) + 1
    return SimpleNamespace(
        additional_config={"kv_eviction": SERVER | settings},
        speculative_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(
            block_size=32,
            effective_attention_block_size=None,
            num_gpu_blocks=blocks,
            kv_cache_max_concurrency=None if blocks is None else blocks / NEEDS,
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            get_total_num_hidden_layers=lambda: 8,
            max_model_len=8192,
        ),
    )


def ask(config: Any, prompt: int = 8000, max_tokens: int | None = 64, **asked: Any) -> None:
    given = {f"kv_eviction_{name}" if name else "kv_eviction": v for name, v in asked.items()}
    params = SamplingParams(max_tokens=max_tokens, extra_args=given)
    check_request(config, params, [1] * prompt, None)


def test_what_start_up_promised_is_let_in():
    for config in (engine(), engine(1.0), engine(4.0)):
        ask(config)
        ask(config, max_tokens=None)
        ask(config, prefill_interval=200, interval=32, budget=400)
        ask(config, prompt=700, **{"": "none"})


@pytest.mark.parametrize(
    "asked",
    [
        {"": "none"},
        {"budget": 1024},
        {"prefill_interval": 0},
        {"prefill_interval": 1000},
        {"interval": 0, "max_tokens": 8000, "prompt": 100},
        {"at": 7000, "prefill_interval": 0},
        # The prompt alone would fit; preempted, it replays its answer, too.
        {"prefill_interval": 0, "prompt": 700, "max_tokens": 400},
        {"prefill_interval": 0, "interval": 32, "prompt": 100, "max_tokens": 8000},
    ],
)
def test_what_would_wait_without_end_is_refused(asked):
    for config in (engine(), engine(1.0)):
        with pytest.raises(ValueError, match=r"may need .* and is sure of 2[56]; lower") as caught:
            ask(config, **asked)
        assert "kv_eviction_prefill_interval" in str(caught.value)
    ask(engine(10.0), **asked), "ten times the memory"
    ask(engine(prefill_interval=0), **asked), "start-up has asked for all of it"


def test_a_request_costs_no_walk_through_its_evictions(monkeypatch):
    """As many evictions are looked at for a long request as for a short one: none."""
    walked: list[int] = []
    evict = EvictionProgress.evict
    monkeypatch.setattr(EvictionProgress, "evict", lambda *a: walked.append(1) or evict(*a))
    config = engine()
    ask(config, prompt=8000, interval=32, prefill_interval=128)
    ask(config, prompt=100, max_tokens=8000, interval=32)
    assert not walked


def test_a_session_is_refused_where_it_need_not_fit():
    refuse_session(engine(prefill_interval=0), SamplingParams())
    with pytest.raises(ValueError, match="session of streaming input is never evicted, and"):
        refuse_session(engine(), SamplingParams())


def test_a_seeded_prompt_that_would_be_cut_is_refused_on_cpus(monkeypatch):
    seeded = SamplingParams(seed=3, temperature=1.0)
    check_request(engine(), seeded, [1] * 768, None)
    with pytest.raises(ValueError, match="kv_eviction_prefill_interval and seed"):
        check_request(engine(), seeded, [1] * 769, None)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    check_request(engine(), seeded, [1] * 769, None)
