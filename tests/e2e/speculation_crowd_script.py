"""Runs in a process of its own: more requests than blocks, with drafts without a KV cache."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.drafters import medusa
from tests.e2e.drafting_crowd_script import POLICIES, POOL, PROMPTS, Crowd
from tests.e2e.speculation_script import ITS_OWN, SPECULATIVE, Drafter
from tests.e2e.test_stores import lose
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, two_biases, two_biases_fp8

OWN: list[dict[str, Any]] = [
    dict(kv_eviction_at=200, kv_eviction_interval=64),
    dict(kv_eviction_at=-40, kv_eviction_budget=64),
    dict(kv_eviction_prefill_interval=128),
    dict(kv_eviction_protect_first=32, kv_eviction_budget=128),
    dict(kv_eviction_at=-60, kv_eviction_budget="40%", kv_eviction_interval=0),
    dict(kv_eviction="none"),
]
"""What requests ask for in the later rounds."""


def main(model: Path, method: str, folder: Path, **more: Any) -> None:
    speculative = SPECULATIVE[method] | dict(method=method)
    if method == "medusa":
        speculative["model"] = str(medusa(folder / "medusa", model))
    fp8 = more.pop("fp8", False)
    eviction = dict(policy=POLICIES[0], allow=[*POLICIES, "none"], budget=96, interval=32) | more
    with engine(
        model, eviction, speculative_config=speculative, max_num_batched_tokens=96,
        kv_cache_dtype="fp8" if fp8 else "auto", **POOL,
    ) as run:  # fmt: skip
        drafter = Drafter(run, PROMPTS)
        # A reset ends the use of files until a restart.
        oracle = MaskedModel(model, two_biases_fp8 if fp8 else two_biases)
        crowd = Crowd(run, oracle, resets="store_path" not in more)
        for points in ([{}] * len(PROMPTS), OWN):
            # Drafts are the proposer's, then the answers, of which every fourth token is wrong.
            drafter.phase = ITS_OWN
            drafter.answers = crowd.round(points)
            for drafter.phase in (0, 2):
                if "store_memory" in more or "store_path" in more:
                    lose(run)
                crowd.round(points)
        counters = run.counters
        result = crowd.result(drafter) | dict(
            restored=counters.stores_restored_memory + counters.stores_restored_file,
            reused=counters.stores_reused,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), **json.loads(sys.argv[4]))
