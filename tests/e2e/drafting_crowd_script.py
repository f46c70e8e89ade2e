"""Runs in a process of its own: more requests than blocks, with layers that draft."""

import json
import sys
from pathlib import Path
from typing import Any

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
INSIDE = [
    dict(kv_eviction_at=200),
    dict(kv_eviction_at=100),
    dict(kv_eviction_prefill_interval=128),
    {},
    dict(kv_eviction_prefill_interval=128),
    {},
]
"""What requests ask for in the second round: evictions inside their prompts."""


def main(method: str, folder: Path, **eviction: Any) -> None:
    model, served, speculative = checkpoints(method, folder)
    eviction = dict(policy=POLICIES[0], allow=POLICIES, budget=96, interval=32) | eviction
    options = dict(num_gpu_blocks_override=22, max_num_batched_tokens=192, max_num_seqs=6)
    with engine(
        served, eviction, speculative_config=speculative, max_model_len=608,
        enable_prefix_caching=True, **options,
    ) as run:  # fmt: skip
        drafter, target, free = Drafter(run, PROMPTS), MaskedModel(model), run.free_blocks()
        hits = inside = agreed = full = preempted = evictions = 0
        look_up = run.scheduler._get_local_prefix_cache_hit

        def counted(request: Any) -> Any:
            nonlocal hits
            hit = look_up(request)
            hits += hit[1] > 0
            return hit

        run.scheduler._get_local_prefix_cache_hit = counted
        schedule, steps = run.scheduler.schedule, 0

        def preempting(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 60:
                run.scheduler.reset_prefix_cache(reset_running_requests=True)
            return schedule(*args)

        run.scheduler.schedule = preempting
        for points in ([{}] * len(PROMPTS), INSIDE):
            asked = [
                dict(kv_eviction=POLICIES[i % len(POLICIES)], **more)
                for i, more in enumerate(points)
            ]
            outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
            for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
                agreed += check_tokens(target, prompt, output, lives)[0]
                full += check_tokens(target, prompt, output, [Life(len(prompt))])[0]
                preempted += len(lives) - 1
                evictions += sum(len(life.evictions) for life in lives)
                inside += sum(kept.n < len(prompt) for life in lives for kept in life.evictions)
        result = dict(
            agreed=agreed,
            total=2 * len(PROMPTS) * NEW_TOKENS,
            full_attention_agreed=full,
            preempted=preempted,
            evictions=evictions,
            inside=inside,
            in_place=run.counters.evictions_in_place,
            hits=hits,
            accepted=drafter.accepted,
            rejected=drafter.drafted - drafter.accepted,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))
