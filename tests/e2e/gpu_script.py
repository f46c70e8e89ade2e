"""Runs under Triton's interpreter: the CUDA worker's path on a CPU, checked by the oracle."""

import json
import sys
from pathlib import Path

from tests.e2e import gpu_on_cpu
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens
from vllm_kvevict.serving import activate

LENGTHS = (200, 133, 1, 150)
NEW_TOKENS = (80, 40, 20, 20)
AT = {"kv_eviction_at": 130, "kv_eviction": "streaming-llm"}


def main(model: Path) -> None:
    activate.WORKERS["vllm.v1.worker.cpu_worker.CPUWorker"] = "tests.e2e.gpu_on_cpu.Worker"
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    options = dict(max_num_batched_tokens=128, max_model_len=320, max_num_seqs=4)
    settings = dict(policy="ada-snapkv", budget=96, interval=32, allow="streaming-llm")
    with engine(model, settings, **options) as run:
        free = run.free_blocks()
        outputs = run.generate(prompts, list(NEW_TOKENS), [{}, {}, {}, AT])
        oracle = MaskedModel(model)
        agreed = total = full = 0
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            same, count = check_tokens(oracle, prompt, output, lives)
            agreed, total = agreed + same, total + count
            full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        builder = run.worker.model_runner.attn_groups[0][0].metadata_builders[0]
        steps, graphs = getattr(run.worker, "steps", []), getattr(run.worker, "graphs", [])
        result = dict(
            runner=type(run.worker.model_runner).__module__,
            builder=type(builder).__name__,
            kernel=builder.buffers.scratch.kernel,
            sizes=[sorted(one.captured) for one in steps],
            replays=sum(one.replays for one in steps),
            padded=sum(one.padded for one in steps),
            launches=sorted(set().union(*(one.launches for one in graphs))),
            agreed=agreed,
            total=total,
            full_attention_agreed=full,
            evictions_at_point=run.lives()[3][0].evictions[0].n == 130,
            evictions=run.counters.evictions,
            evictions_decode=run.counters.evictions_decode,
            evictions_on_worker=run.worker.kv_eviction.evictions,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    assert gpu_on_cpu.Worker
    main(Path(sys.argv[1]))
