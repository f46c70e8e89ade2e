"""No request's tokens depend on another's: over HTTP under load, and bitwise step by step."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.test_own_settings import asks
from tests.e2e.test_server import complete
from tests.models import random_prompt
from tests.oracles.engine import Engine, engine
from tests.oracles.masked import MaskedModel, check_tokens

POLICIES = ("ada-snapkv", "snapkv", "streaming-llm", "tova", "nacl", "none")
SETTINGS = dict(policy="ada-snapkv", budget=96, interval=32, allow=POLICIES, shared_blocks="evict")
NEW = 70
PREFIX = random_prompt(330, seed=40)
TENANTS = [
    asks(budget=64), asks(budget=256), asks("none"), asks("streaming-llm", budget=96),
    asks("nacl", budget="30%", interval=64), asks(at=300, interval=0),
]  # fmt: skip
QUESTIONS = [PREFIX, PREFIX + random_prompt(20, seed=41), PREFIX + random_prompt(90, seed=43)]
LOAD = [(prompt, asked) for prompt in QUESTIONS for asked in TENANTS]
OPTIONS = dict(max_model_len=2048, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def truth(tiny_model) -> list[list[int]]:
    """Every tenant's tokens without prefix caching; the oracle, which takes them alone, agrees."""
    oracle = MaskedModel(tiny_model)
    prompts, asked = map(list, zip(*LOAD, strict=True))
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        answers = run.generate(prompts, NEW, asked)
        for prompt, mine, answer, lives in zip(prompts, asked, answers, run.lives(), strict=True):
            assert bool(lives[0].evictions) == (mine != asks("none"))
            assert check_tokens(oracle, prompt, answer, lives) == (NEW, NEW)
    assert len({tuple(answer) for answer in answers[:6]}) >= 5, "budgets change tokens"
    return answers


def test_tenants_under_load(ample, truth):
    """Same prefix, different budgets, at once and over each other's cached blocks."""
    rng = random.Random(0)
    hits = ample.metric("vllm:prefix_cache_hits_total")
    preempted = ample.metric("vllm:num_preemptions_total")
    order = [index for index in range(len(LOAD)) for _ in range(3)]
    rng.shuffle(order)

    def ask(index: int) -> list[int]:
        prompt, asked = LOAD[index]
        return complete(ample, prompt, vllm_xargs=asked, max_tokens=NEW)[0]["token_ids"]

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(ask, order))
    for index, tokens in zip(order, answers, strict=True):
        assert tokens == truth[index], LOAD[index][1]
    assert ample.metric("vllm:prefix_cache_hits_total") - hits > len(order) * 200
    assert ample.metric("vllm:num_preemptions_total") == preempted


class Probe:
    """Runs a victim among neighbours; returns all that could tell it of them, bit by bit."""

    def __init__(self, run: Engine) -> None:
        self._run = run

    def __call__(
        self, first: list[tuple[list[int], dict[str, Any]]], neighbours: list[dict[str, Any]]
    ) -> tuple[list[int], list[list[tuple[int, str]]], list[Any]]:
        """``first`` fills the prefix cache. The victim then runs beside neighbours of one prompt.

        Every step has the same rows of the same lengths whatever the neighbours ask for, so that
        matrix products round alike and any difference is a leak.
        """
        run = self._run
        run.llm.reset_prefix_cache()
        for prompt, asked in first:
            run.generate([prompt], NEW, [asked])
        prompts = [QUESTIONS[1], *(PREFIX + [9 + n] * 20 for n in range(len(neighbours)))]
        params = [
            SamplingParams(
                temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=5, extra_args=dict(asked)
            )
            for asked in [asks("snapkv", budget=128), *neighbours]
        ]
        run.recorder.lives.clear()
        requests = [dict(prompt_token_ids=prompt) for prompt in prompts]
        victim = run.llm.generate(requests, params, use_tqdm=False)[0].outputs[0]
        bits = [
            [(token, float(entry.logprob).hex()) for token, entry in sorted(step.items())]
            for step in victim.logprobs
        ]
        assert all(math.isfinite(float.fromhex(bit)) for step in bits for _, bit in step)
        return list(victim.token_ids), bits, run.lives()[0]


@pytest.mark.nightly
def test_bitwise_whatever_the_neighbours_ask_for(tiny_model):
    """Log-probabilities and kept positions are the same bits, prefix caching on."""
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, **OPTIONS) as run:
        hits = []
        look_up = run.scheduler._get_local_prefix_cache_hit
        run.scheduler._get_local_prefix_cache_hit = lambda request: (
            hits.append(look_up(request)[1]) or look_up(request)
        )
        probe = Probe(run)
        quiet = probe([(PREFIX, asks("none"))], [asks("none")] * 5)
        assert sum(hits) > 1000 and len(quiet[2]) == 1 and len(quiet[2][0].evictions) >= 3
        for first in (asks(budget=64), asks("nacl", budget="20%"), asks(at=200, interval=0)):
            before = run.counters.evictions
            assert probe([(PREFIX, first)], TENANTS[:5]) == quiet
            assert probe([(PREFIX, first)] * 3, [asks(budget=64)] * 5) == quiet
            assert run.counters.evictions - before > 20
        other = probe([(PREFIX, asks("none"))], [asks("none")] * 4)
        assert other[0] == quiet[0] and other[2] == quiet[2]
