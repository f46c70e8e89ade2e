"""Reports the budget in whole blocks, once the block size is known.

vLLM enlarges blocks if the pages of layers differ in size, and for recurrent states, after the
front end has read the configuration.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import evictable_stages
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.rules.layers import padding, sizes_by_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from vllm_kvevict.rules.rule import EvictionRule

logger = init_logger("vllm.kv_eviction.budgets")

SHORTFALL = 0.1
"""Share of the budget that may be lost to whole blocks without a warning."""


def report_budgets(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> None:
    """Log the blocks that a request keeps, and warn if they differ from the budget.

    Args:
        vllm_config: Configuration of the engine.
        config: Configuration of eviction.
        block_size: Tokens in a block of the layers that evict.

    """
    longest = vllm_config.model_config.max_model_len
    rule = config.rule(block_size)
    how_often = f"every {rule.stride} decode steps" if rule.stride else "after prefill only"
    if rule.every:
        how_often = f"every {rule.prefill_stride} tokens of prompt and answer"
    elif rule.prefill_stride:
        how_often += f" and every {rule.prefill_stride} tokens of a prompt"
    blocks, tokens = "grows with the sequence", config.budget_tokens
    if config.keeps_by_layer(config.policy):
        blocks = "by layer"
    elif tokens is not None:
        blocks = f"{rule.store_blocks(0)} per request"
    logger.info(
        "KV eviction: block size %d tokens, store blocks: %s, evicts %s.",
        block_size,
        blocks,
        how_often,
    )
    if rule.page_tokens > block_size:
        _report_stored(config, rule, longest)
    if config.has_groups:
        _report_groups(vllm_config, config, block_size)
    if tokens is None:
        return
    kept, advice = _kept(vllm_config, config, block_size)
    if abs(kept - tokens) > SHORTFALL * tokens:
        logger.warning(
            "KV eviction keeps %d tokens per KV head instead of the budget of %d: a store "
            "consists of whole blocks of %d tokens, at least one, in addition to the last %d "
            "tokens. %s",
            kept,
            tokens,
            rule.page_tokens,
            rule.protected,
            advice,
        )
    if not rule.evictable(longest):
        logger.warning(
            "KV eviction will never run: with a budget of %d tokens, nothing is evicted in "
            "sequences of up to %d tokens (--max-model-len).",
            tokens,
            longest,
        )


def _report_stored(config: EvictionConfig, rule: "EvictionRule", longest: int) -> None:
    """Log what a budget comes to in a format of its own, in tokens and in memory."""
    store = rule.store_blocks(longest)
    kept = store * rule.page_tokens + rule.protected
    memory = store * rule.block_size + rule.protected
    logger.info(
        "KV eviction stores tokens as %s: a block holds %d of them instead of %d. A budget of %s "
        "keeps at most %d tokens per KV head of a sequence of %d, in the memory of %d (%.1f%%).",
        config.store_dtype,
        rule.page_tokens,
        rule.block_size,
        config.budget,
        min(kept, longest),
        longest,
        memory,
        100 * memory / longest,
    )


def _kept(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> tuple[int, str]:
    """Return the tokens kept per KV head with whole blocks, as a mean over layers, and advice for a
    better fit."""
    # vLLM makes the blocks of a hybrid model large enough for a recurrent state, regardless of the
    # flag.
    smaller = "a smaller --block-size"
    if vllm_config.model_config.is_hybrid:
        smaller = "a smaller recurrent state (--mamba-ssm-cache-dtype, --mamba-cache-dtype)"
    rule = config.rule(block_size)
    if not config.keeps_by_layer(config.policy):
        kept = rule.store_blocks(0) * rule.page_tokens + rule.protected
        return kept, f"A budget of {kept}, or {smaller}, fits."
    rules = config.layer_rules(block_size, *evictable_stages(vllm_config))
    longest = vllm_config.model_config.max_model_len
    blocks = sum(rule.store_blocks(longest) for rule in rules)
    kept = blocks * rule.page_tokens // len(rules) + rule.protected
    return kept, f"A larger budget, or {smaller}, is closer."


def _report_groups(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> None:
    """Log the groups of layers, the blocks that each keeps, and the memory that uneven groups
    waste."""
    stages = evictable_stages(vllm_config)
    layers = sum(stages)
    longest = vllm_config.model_config.max_model_len
    rules = config.layer_rules(block_size, *stages)
    groups = sorted(set(rules), key=lambda rule: rule.share.group if rule.share else 0)
    sizes = [rules.count(group) for group in groups]
    logger.info(
        "KV eviction: layers in groups of %s, %s, with stores of %s blocks in a sequence of %d "
        "tokens.",
        ", ".join(map(str, sizes)),
        _shares(config, groups),
        ", ".join(str(group.store_blocks(longest)) for group in groups),
        longest,
    )
    _report_minimum_blocks(config, groups)
    members = [[at for at, rule in enumerate(rules) if rule == group] for group in groups]
    missing = padding(*sizes_by_stage(members, stages))
    # If some layers do not evict, vLLM forms other groups and reports their waste itself.
    if missing and layers == vllm_config.model_config.get_total_num_hidden_layers():
        logger.warning(
            "KV eviction: groups of %s layers leave %.1f%% of the KV cache unused; a "
            "number of groups (option groups) that divides the %d layers would leave none.",
            ", ".join(map(str, sizes)),
            100 * missing / (layers + missing),
            layers,
        )


def _shares(config: EvictionConfig, groups: "Sequence[EvictionRule]") -> str:
    if not isinstance(config.profile, Profile):
        return "shallow to deep"
    shares = ", ".join(f"{rule.share.value:.2f}" for rule in groups if rule.share)
    return f"with shares of {shares} as {config.profile.policy} measured them"


def _report_minimum_blocks(config: EvictionConfig, groups: "Sequence[EvictionRule]") -> None:
    """Log when groups keep more than their share because a store has at least one block."""
    if not config.keeps_by_layer(config.policy):
        return
    page_tokens = groups[0].page_tokens
    smallest = min(rule.share.value for rule in groups if rule.share)
    # Mean budget for which the smallest share amounts to one block in addition to recent tokens.
    enough = page_tokens / smallest + groups[0].protected
    if config.budget_share is not None:
        # A share is one of the memory, of which the block has that of fewer tokens.
        memory = groups[0].block_size / smallest + groups[0].protected
        logger.info(
            "KV eviction: in prompts of less than %d tokens, some layers keep a block of %d tokens "
            "although their share is smaller; the other layers keep correspondingly less.",
            memory / config.budget_share,
            page_tokens,
        )
    elif config.budget_tokens is not None and config.budget_tokens < enough:
        lifted = sum(
            rule.share.value * (config.budget_tokens - groups[0].protected) < page_tokens
            for rule in groups
            if rule.share
        )
        logger.info(
            "KV eviction: with a budget of %d tokens, %d of %d groups keep a block of %d tokens "
            "although their share is smaller; the other layers keep correspondingly less.",
            config.budget_tokens,
            lifted,
            len(groups),
            page_tokens,
        )
