"""vLLM in this process with audits of every request, asked one document at a time."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.audit.listener import Listener
from benchmarks.provenance import add_model, add_profile
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.requests import AT, BUDGET, INTERVAL, POLICY

BLOCK = 32
ANSWER = 16
"""Most tokens of an answer."""

PROFILED = {"probe", "ada-probe"}
"""Policies that need the model's profile; the others are served without one."""


def settings(policy: str) -> dict[str, Any]:
    """What the engine is told of eviction under a policy."""
    given = dict(
        policy=policy, budget="50%", interval=0, audit="100%", allow="none",
        shared_blocks="evict",
    )  # fmt: skip
    if policy in PROFILED:
        given["profile"] = "auto"
    return given


def evicted(point: int, budget: str) -> dict[str, Any]:
    """The ``vllm_xargs`` of a request that is evicted at ``point``."""
    return {AT: point, BUDGET: budget, INTERVAL: 0}


WHOLE = {POLICY: "none"}
"""The ``vllm_xargs`` of a request that keeps everything."""


class Audited:
    """An ``LLM`` and its listener."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.listener = Listener(llm)

    def generate(
        self, prompts: Sequence[Sequence[int]], asked: Sequence[dict[str, Any]], tokens: int = 1
    ) -> list[tuple[int, list[int]]]:
        """Greedy answers: each request's number, by which the listener knows it, and tokens."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [
                SamplingParams(temperature=0, max_tokens=tokens, extra_args=dict(mine))
                for mine in asked
            ],
            use_tqdm=False,
        )
        return [(int(one.request_id), list(one.outputs[0].token_ids)) for one in outputs]


@contextmanager
def engine(model: Path, policy: str, dtype: str = "bfloat16", **changes: Any) -> Iterator[Audited]:
    """An engine in this process, shut down at the end; ``changes`` of its settings of eviction."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        str(model), dtype=dtype, enforce_eager=True, block_size=BLOCK, seed=0,
        kv_cache_memory_bytes=1 << 30, max_model_len=4096, max_num_batched_tokens=4096,
        max_num_seqs=16, enable_prefix_caching=True, disable_log_stats=False,
        additional_config={"kv_eviction": settings(policy) | changes},
    )  # fmt: skip
    add_model(model)
    served = llm.llm_engine.vllm_config.additional_config[CONFIG_KEY]
    if probe := (served["profile"] or {}).get("probe"):
        add_profile(probe["file"], probe["sha256"])
    try:
        yield Audited(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
