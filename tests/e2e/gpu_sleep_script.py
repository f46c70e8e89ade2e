"""Runs under Triton's interpreter: the CUDA worker sleeps, and its tokens are compared."""

import json
import sys
from pathlib import Path

from tests.e2e.sleep_orders import sleepy
from tests.models import random_prompt
from tests.oracles.engine import engine
from vllm_kvevict.serving import activate

LENGTH, NEW_TOKENS = 280, 6
ORDERS = (["release", "sleep 1"], ["sleep 2", "wake weights", "release"])


def main(model: Path, store_dtype: str) -> None:
    activate.WORKERS["vllm.v1.worker.cpu_worker.CPUWorker"] = (
        "tests.e2e.sleeping.PretendedGPUWorker"
    )
    prompts = [random_prompt(LENGTH, seed=1)]
    options = dict(max_num_batched_tokens=320, max_model_len=320, max_num_seqs=2)
    settings = dict(policy="ada-snapkv", budget=160, interval=32, store_dtype=store_dtype)
    with engine(model, settings, enable_prefix_caching=True, **options) as run:
        expected = run.generate(prompts, NEW_TOKENS)
        evictions, same = run.counters.evictions, []
        for order in ORDERS:
            sleepy(run, model, order)
            same.append(run.generate(prompts, NEW_TOKENS) == expected)
        total = run.counters.evictions
    print(json.dumps(dict(same=same, evictions=evictions, total=total)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
