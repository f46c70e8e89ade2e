"""Refuses requests that do not fit into a KV cache smaller than the longest sequence.

vLLM promises at start-up that every request fits. Where prompts evict as they stream in it promises
so much only for the server's own settings; a request that asks for others must be refused where it
would wait for blocks without end.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.limits import max_blocks_for
from vllm_kvevict.config.memory_budget import evictable_stages
from vllm_kvevict.config.requests import (
    BUDGET,
    INTERVAL,
    PREFILL_INTERVAL,
    PROTECT,
    RequestOptions,
)
from vllm_kvevict.rules.rule import EvictionRule, blocks_for
from vllm_kvevict.serving.rules import server_rules

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_blocks(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Refuse a number of blocks that does not hold the longest sequence in all groups of layers.

    Raises:
        ValueError: In one sentence, how many blocks are needed and why.

    """
    cache, longest = vllm_config.cache_config, vllm_config.model_config.max_model_len
    given = cache.num_gpu_blocks_override
    if given is None or not config.has_groups:
        return
    groups = set(config.layer_rules(cache.block_size, *evictable_stages(vllm_config)))
    needed = sum(rule.max_blocks(longest) for rule in groups)
    if len(groups) > 1 and given < needed:
        raise ValueError(
            f"KV eviction: --num-gpu-blocks-override {given} counts blocks of single groups of "
            f"layers, of which this server has {len(groups)} with individual budgets, and a "
            f"sequence of {longest} tokens needs {needed}; give at least as many, lower "
            "--max-model-len or set groups in --kv-eviction-options to 1."
        )


def capacity(vllm_config: "VllmConfig", rules: Sequence[EvictionRule]) -> int | None:
    """Blocks that one request finds for certain; None where the longest sequence fits as it is.

    Args:
        vllm_config: Of the engine, with what it reported when it was ready.
        rules: The server's rule of every layer, or of every group, that evicts.

    """
    if not any(rule.prefill_stride for rule in rules):
        return None
    promised = _promised(frozenset(rules), vllm_config.model_config.max_model_len)
    if promised is None:
        return None
    cache = vllm_config.cache_config
    times, blocks = cache.kv_cache_max_concurrency, cache.num_gpu_blocks
    if not times or not blocks:
        return promised
    # One block is vLLM's own.
    return max(promised, int(promised * times * (blocks - 1) / blocks))


def whole_blocks(vllm_config: "VllmConfig", length: int) -> tuple[int, int] | None:
    """Blocks of a sequence that is never evicted, and those that are sure; None where it fits."""
    if (known := server_rules(vllm_config)) is None:
        return None
    most = capacity(vllm_config, known.rules)
    needed = sum(blocks_for(length, rule.block_size) for rule in set(known.rules))
    return None if most is None or needed <= most else (needed, most)


@cache
def _promised(groups: frozenset[EvictionRule], longest: int) -> int | None:
    """Memory that start-up asked for; None if it asked for the longest sequence."""
    promised = sum(rule.max_blocks(longest) for rule in groups)
    whole = sum(blocks_for(longest, rule.block_size) for rule in groups)
    return None if promised == whole else promised


def check_capacity(
    vllm_config: "VllmConfig",
    rules: Sequence[EvictionRule],
    options: RequestOptions,
    prompt_len: int,
    max_tokens: int | None,
) -> None:
    """Refuse a request that could hold more blocks than there are.

    Args:
        vllm_config: Of the engine.
        rules: The server's rule of every layer, or of every group, that evicts.
        options: What the request asked for.
        prompt_len: Tokens of the prompt.
        max_tokens: Tokens of the longest answer; None for as many as fit.

    Raises:
        ValueError: In one sentence, how much it needs and which keys lower that.

    """
    most = capacity(vllm_config, rules)
    if most is None:
        return
    longest = vllm_config.model_config.max_model_len
    ends = longest if max_tokens is None else min(longest, prompt_len + max_tokens)
    groups = set(rules)
    needed = sum(max_blocks_for(options, rule, prompt_len, ends) for rule in groups)
    if needed > most:
        raise ValueError(
            f"KV eviction: this request may need {needed} blocks of the KV cache and is sure of "
            f"{most}; lower {BUDGET}, {PROTECT}, {INTERVAL}, {PREFILL_INTERVAL} or max_tokens, or "
            "omit the keys"
        )
