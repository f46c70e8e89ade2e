"""Requests with a target on some ranks: tokens, and what they came to, as JSON."""

import json
import os
import sys
from pathlib import Path

from tests.models import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 700)]


def main(model: Path, ranks: int) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("01"[:ranks])
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=256,
        tensor_parallel_size=ranks,
        additional_config={"kv_eviction": dict(policy="snapkv", interval=32, target=0.05)},
    )
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [dict(prompt_token_ids=prompt) for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert pool.get_num_free_blocks() == free
    told = [output.kv_transfer_params["kv_eviction"] for output in outputs]
    for one in told:
        one.pop("kl_nats", None)  # To the last digit it depends on the ranks.
    print(json.dumps(dict(tokens=[list(o.outputs[0].token_ids) for o in outputs], told=told)))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
