"""Two tensor-parallel ranks over a latent cache: tokens, and what each rank kept, as a pickle."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from tests.models import random_prompt
from tests.oracles.engine import layers_by_depth

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 60)]
NEW_TOKENS = 110
EVICTION = dict(budget=96, interval=32)


def listen(worker: Any) -> None:
    worker.heard = []
    worker.kv_eviction.listeners.append(worker.heard.append)


def heard(worker: Any) -> list[Any]:
    return worker.heard


def layers(worker: Any) -> dict[int, list[int]]:
    return layers_by_depth(worker.kv_eviction.states)


def main(model: Path, policy: str, target: Path, *profile: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    learned = dict(profile=profile[0]) if profile else {}

    llm = LLM(
        str(model),
        tensor_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        additional_config={"kv_eviction": dict(policy=policy, **EVICTION, **learned)},
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    llm.collective_rpc(listen)
    outputs = llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    leaked = free - pool.get_num_free_blocks()
    groups, records = llm.collective_rpc(layers)[0], llm.collective_rpc(heard)
    result = dict(tokens=tokens, layers=groups, records=records, leaked=leaked)
    target.write_bytes(pickle.dumps(result))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
