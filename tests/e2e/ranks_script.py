"""Some ranks on the CPU: tokens, evictions and leaks of some rounds, as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.v2_script import force_async_scheduling
from tests.models import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 60)]
NEW_TOKENS = 110
EVICTION = dict(budget=96, interval=32)
DOCUMENT = random_prompt(300, seed=5)
QUESTIONS = [DOCUMENT + random_prompt(20, seed=seed) for seed in (1, 1, 2)]
POINT = {"kv_eviction_at": len(DOCUMENT), "kv_eviction_interval": 0}
SHARED = 40
"""Tokens of the answers to them."""
DRAFTED = "vllm:spec_decode_num_draft_tokens"
SHARING = ("snapkv", "ada-snapkv")


def lose(scheduler: Any, folder: Path, memory: bool) -> None:
    """Let the KV cache lose its stores once both ranks have written theirs; ``memory``, too."""
    deadline = time.monotonic() + 30
    while len(list(folder.glob("*/*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    pool, stores = scheduler.kv_cache_manager.block_pool, scheduler._stores
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    while memory and stores._kept:
        name, size = stores._kept.popitem()
        stores._next.forgotten.append(name)
        stores.kept_bytes -= size


def main(model: Path, eviction: dict[str, Any], options: dict[str, Any], folder: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    if options.get("async_scheduling"):
        force_async_scheduling()

    sharing = eviction["policy"] in SHARING
    tiers = dict(store_memory="1G", store_path=folder) if folder and sharing else {}
    llm = LLM(
        str(model),
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=256,
        disable_log_stats=False,
        additional_config={"kv_eviction": dict(audit="100%", **EVICTION) | eviction | tiers},
        **options,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sharing = sharing and len(scheduler._evicting) == len(scheduler.kv_cache_config.kv_cache_groups)
    pool = scheduler.kv_cache_manager.block_pool
    free, audits, measured = pool.get_num_free_blocks(), [], scheduler._reporter.measured

    def noted(**values: Any) -> None:
        audits.extend(values.get("audits", ()))
        measured(**values)

    scheduler._reporter.measured = noted
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    rounds = []
    for _ in range(2):
        outputs = llm.generate(
            [dict(prompt_token_ids=prompt) for prompt in PROMPTS], params, use_tqdm=False
        )
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
    result: dict[str, Any] = dict(rounds=rounds, counters=scheduler.eviction_counters.as_dict())
    result["scheduler"] = type(scheduler).__name__
    result["audits"] = list(audits)
    drafted = (one.value for one in llm.get_metrics() if one.name == DRAFTED)
    result["drafted"] = sum(drafted)
    asked_of = dict(point=POINT, memory=POINT, file=POINT)
    for name, asked in asked_of.items() if sharing else ():
        if name in ("memory", "file"):
            if not tiers:
                continue
            lose(scheduler, Path(folder), memory=name == "file")
        before = scheduler.eviction_counters.as_dict()
        outputs = llm.generate(
            [dict(prompt_token_ids=prompt) for prompt in QUESTIONS],
            SamplingParams(temperature=0, max_tokens=SHARED, ignore_eos=True, extra_args=asked),
            use_tqdm=False,
        )
        after = scheduler.eviction_counters.as_dict()
        result[name] = dict(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            counters={counter: after[counter] - before[counter] for counter in after},
        )
    result["leaked"] = free - pool.get_num_free_blocks()
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
