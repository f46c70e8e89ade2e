"""Runs under Triton's interpreter: policies that extend attention, on the CUDA worker's path.

The same requests run on vLLM's CPU worker first. Tokens and kept positions must be the same.
"""

import json
import sys
from pathlib import Path

from tests.e2e import gpu_on_cpu
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens
from vllm_kvevict.serving import activate

LENGTHS = (120, 100, 110, 90, 60)
ASKED = [
    {},
    {"kv_eviction": "subgen-stream"},
    {"kv_eviction": "ada-h2o", "kv_eviction_at": 96},
    {"kv_eviction": "streaming-llm"},
    {"kv_eviction": "none"},
]
NEW_TOKENS = (40, 40, 12, 12, 4)
SETTINGS = dict(
    policy="h2o", budget=64, interval=16, allow="ada-h2o,subgen-stream,streaming-llm,none"
)
OPTIONS = dict(max_num_batched_tokens=96, max_model_len=512, max_num_seqs=5)


def served(model: Path, store_dtype: str) -> tuple[list[list[int]], list[list[Life]], dict]:
    # A page of a store in few bits has more tokens.
    longer = 0 if store_dtype == "auto" else 150
    prompts = [random_prompt(n + longer, seed=n) for n in LENGTHS]
    with engine(model, SETTINGS | dict(store_dtype=store_dtype), **OPTIONS) as run:
        free = run.free_blocks()
        outputs = run.generate(prompts, list(NEW_TOKENS), ASKED)
        lives = run.lives()
        agreed = total = full = 0
        if store_dtype == "auto":
            oracle = MaskedModel(model)
            for prompt, output, mine in zip(prompts, outputs, lives, strict=True):
                same, count = check_tokens(oracle, prompt, output, mine)
                agreed, total = agreed + same, total + count
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        builder = run.worker.model_runner.attn_groups[0][0].metadata_builders[0]
        facts = dict(
            builder=type(builder).__name__,
            agreed=agreed,
            total=total,
            full_attention_agreed=full,
            evictions=run.counters.evictions,
            evictions_on_worker=run.worker.kv_eviction.evictions,
            blocks_leaked=free - run.free_blocks(),
        )
        return outputs, lives, facts


def main(model: Path, store_dtype: str) -> None:
    on_cpu = served(model, store_dtype)
    activate.WORKERS["vllm.v1.worker.cpu_worker.CPUWorker"] = "tests.e2e.gpu_on_cpu.Worker"
    on_gpu = served(model, store_dtype)
    positions = [
        [[kept.positions for kept in life.evictions] for mine in lives for life in mine]
        for lives in (on_cpu[1], on_gpu[1])
    ]
    print(
        json.dumps(
            dict(
                cpu=on_cpu[2],
                gpu=on_gpu[2],
                same_tokens=on_cpu[0] == on_gpu[0],
                same_positions=str(positions[0]) == str(positions[1]),
            )
        )
    )


if __name__ == "__main__":
    assert gpu_on_cpu.Worker
    main(Path(sys.argv[1]), sys.argv[2])
