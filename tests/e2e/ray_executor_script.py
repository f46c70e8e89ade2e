"""Ranks that are Ray's actors: tokens and evictions, as JSON.

vLLM 0.32 gives Ray's executor no CPUs. Here they count as what Ray calls GPUs, which no process
uses: the actors, what is pickled for them and their environment are Ray's and vLLM's own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

from tests.e2e.ranks_script import EVICTION, NEW_TOKENS, PROMPTS
from tests.e2e.ray_script import QUICK

RANKS = 2


def pretend() -> None:
    """What every process of Ray's runs first."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def main(model: Path, policy: str, options: dict[str, Any], folder: str) -> None:
    os.environ |= QUICK | dict(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1"
    )
    from vllm import LLM, SamplingParams

    pretend()
    ray.init(
        num_gpus=RANKS,
        include_dashboard=False,
        _temp_dir=folder,
        runtime_env=dict(worker_process_setup_hook="tests.e2e.ray_executor_script.pretend"),
    )
    llm = LLM(
        str(model),
        distributed_executor_backend="ray",
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=256,
        additional_config={"kv_eviction": EVICTION | dict(policy=policy)},
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    outputs = llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    result = dict(
        executor=type(core.model_executor).__name__,
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        counters=core.scheduler.eviction_counters.as_dict(),
        leaked=free - pool.get_num_free_blocks(),
    )
    core.shutdown()
    ray.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
