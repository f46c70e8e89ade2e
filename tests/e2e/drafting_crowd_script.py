"""Runs in a process of its own: more requests than blocks, with layers that draft."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.drafters import checkpoints
from tests.e2e.drafting_script import Drafter
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

SHARED = random_prompt(128, seed=1)
PROMPTS = [
    [*(SHARED if n % 2 else ()), *random_prompt(n, seed=n)] for n in (333, 150, 281, 64, 203, 90)
]
NEW_TOKENS = 130
POLICIES = ("ada-snapkv", "streaming-llm", "ada-defensive")
POOL = dict(
    num_gpu_blocks_override=22, max_num_seqs=6, max_model_len=608, enable_prefix_caching=True
)
INSIDE = [
    dict(kv_eviction_at=200),
    dict(kv_eviction_at=100),
    dict(kv_eviction_prefill_interval=128),
    {},
    dict(kv_eviction_prefill_interval=128),
    {},
]
"""What requests ask for in the second round: evictions inside their prompts."""


def preempt_all(scheduler: Any, **asked: bool) -> None:
    """What vLLM does before it resets the prefix cache."""
    with mock.patch.object(scheduler.kv_cache_manager, "reset_prefix_cache", return_value=True):
        Scheduler.reset_prefix_cache(scheduler, **asked)


class Crowd:
    """All prompts at once, some preempted, and what the oracle says of their tokens.

    Args:
        run: The engine, whose pool is too small for all.
        target: The oracle.
        resets: Whether the prefix cache is lost when all are preempted once.

    """

    def __init__(self, run: Any, target: MaskedModel, resets: bool = True) -> None:
        self._run, self._target, self._resets = run, target, resets
        self._free, self._steps = run.free_blocks(), 0
        self._look_up = run.scheduler._get_local_prefix_cache_hit
        self._schedule = run.scheduler.schedule
        run.scheduler._get_local_prefix_cache_hit = self._counted
        run.scheduler.schedule = self._preempting
        self._found = dict.fromkeys(
            ("agreed", "total", "full_attention_agreed", "preempted", "evictions", "inside"), 0
        )
        self._hits = 0

    def _counted(self, request: Any) -> Any:
        hit = self._look_up(request)
        self._hits += hit[1] > 0
        return hit

    def _preempting(self, *args: Any) -> Any:
        self._steps += 1
        if self._steps == 60:
            scheduler = self._run.scheduler
            reset = type(scheduler).reset_prefix_cache if self._resets else preempt_all
            reset(scheduler, reset_running_requests=True)
        return self._schedule(*args)

    def round(self, points: list[dict[str, Any]]) -> list[list[int]]:
        """The answers, where the i-th request asks for ``points[i]`` under a policy of its own."""
        asked = [
            dict(kv_eviction=POLICIES[i % len(POLICIES)]) | more for i, more in enumerate(points)
        ]
        outputs, found = self._run.generate(PROMPTS, NEW_TOKENS, asked), self._found
        for prompt, output, lives in zip(PROMPTS, outputs, self._run.lives(), strict=True):
            found["agreed"] += check_tokens(self._target, prompt, output, lives)[0]
            found["total"] += NEW_TOKENS
            full = [Life(len(prompt))]
            found["full_attention_agreed"] += check_tokens(self._target, prompt, output, full)[0]
            found["preempted"] += len(lives) - 1
            found["evictions"] += sum(len(life.evictions) for life in lives)
            found["inside"] += sum(
                kept.n < len(prompt) for life in lives for kept in life.evictions
            )
        return outputs

    def result(self, drafter: Any) -> dict[str, int]:
        return self._found | dict(
            in_place=self._run.counters.evictions_in_place,
            hits=self._hits,
            accepted=drafter.accepted,
            rejected=drafter.drafted - drafter.accepted,
            blocks_leaked=self._free - self._run.free_blocks(),
        )


def main(method: str, folder: Path, **eviction: Any) -> None:
    model, served, speculative = checkpoints(method, folder)
    eviction = dict(policy=POLICIES[0], allow=POLICIES, budget=96, interval=32) | eviction
    with engine(
        served, eviction, speculative_config=speculative, max_num_batched_tokens=192, **POOL
    ) as run:
        drafter, crowd = Drafter(run, PROMPTS), Crowd(run, MaskedModel(model))
        for points in ([{}] * len(PROMPTS), INSIDE):
            crowd.round(points)
        result = crowd.result(drafter)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))
