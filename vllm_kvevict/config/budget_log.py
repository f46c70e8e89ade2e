"""What the budget comes to in whole blocks: said once the block size is known.

vLLM enlarges blocks where layers' pages differ in size, and for recurrent states, after the front
door has read the configuration.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import evictable_stages
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.timeline.layers import padding, sizes_by_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from vllm_kvevict.timeline.rule import EvictionRule

logger = init_logger("vllm.kv_eviction.budgets")

SHORTFALL = 0.1
"""Share of the budget that may be lost to whole blocks before a warning."""


def report_budgets(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> None:
    """Log the blocks that a request keeps, and where they are not what was asked for.

    Args:
        vllm_config: Of the engine.
        config: The settings of eviction.
        block_size: Tokens in a block of the layers that evict.

    """
    longest = vllm_config.model_config.max_model_len
    timeline = config.timeline(block_size)
    how_often = f"every {timeline.stride} decode steps" if timeline.stride else "after prefill only"
    if timeline.prefill_stride:
        how_often += f" and every {timeline.prefill_stride} tokens of a prompt"
    blocks, tokens = "grows with the sequence", config.budget_tokens
    if config.keeps_by_layer(config.policy):
        blocks = "by layer"
    elif tokens is not None:
        blocks = f"{timeline.store_blocks(0)} per request"
    logger.info(
        "KV eviction: block size %d tokens, store blocks: %s, evicts %s.",
        block_size,
        blocks,
        how_often,
    )
    if config.has_groups:
        _report_groups(vllm_config, config, block_size)
    if tokens is None:
        return
    kept, advice = _kept(vllm_config, config, block_size)
    if abs(kept - tokens) > SHORTFALL * tokens:
        logger.warning(
            "KV eviction keeps %d tokens per KV head instead of the budget of %d: a store is "
            "made of whole blocks of %d tokens, at least one, beside the last %d tokens. %s",
            kept,
            tokens,
            block_size,
            timeline.protected,
            advice,
        )
    if not timeline.evictable(longest):
        logger.warning(
            "KV eviction will never run: at a budget of %d tokens nothing is evicted up to the "
            "longest sequence of %d tokens (--max-model-len).",
            tokens,
            longest,
        )


def _kept(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> tuple[int, str]:
    """Tokens that whole blocks keep per KV head, on average over layers, and what would fit."""
    # vLLM makes the blocks of a hybrid large enough for a recurrent state, whatever the flag says.
    smaller = "a smaller --block-size"
    if vllm_config.model_config.is_hybrid:
        smaller = "a smaller recurrent state (--mamba-ssm-cache-dtype, --mamba-cache-dtype)"
    timeline = config.timeline(block_size)
    if not config.keeps_by_layer(config.policy):
        kept = timeline.store_blocks(0) * block_size + timeline.protected
        return kept, f"A budget of {kept}, or {smaller}, fits."
    rules = config.timelines(block_size, *evictable_stages(vllm_config))
    longest = vllm_config.model_config.max_model_len
    blocks = sum(rule.store_blocks(longest) for rule in rules)
    kept = blocks * block_size // len(rules) + timeline.protected
    return kept, f"A larger budget, or {smaller}, comes nearer."


def _report_groups(vllm_config: "VllmConfig", config: EvictionConfig, block_size: int) -> None:
    """Say which layers share a budget, what each keeps, and what uneven groups cost."""
    stages = evictable_stages(vllm_config)
    layers = sum(stages)
    longest = vllm_config.model_config.max_model_len
    timelines = config.timelines(block_size, *stages)
    groups = sorted(set(timelines), key=lambda rule: rule.share.group if rule.share else 0)
    sizes = [timelines.count(group) for group in groups]
    logger.info(
        "KV eviction: layers in groups of %s, %s, with stores of %s blocks in a sequence of %d "
        "tokens.",
        ", ".join(map(str, sizes)),
        _shares(config, groups),
        ", ".join(str(group.store_blocks(longest)) for group in groups),
        longest,
    )
    _report_least(config, groups)
    members = [[at for at, rule in enumerate(timelines) if rule == group] for group in groups]
    missing = padding(*sizes_by_stage(members, stages))
    # Among layers that do not evict vLLM makes other groups, and says itself what they waste.
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


def _report_least(config: EvictionConfig, groups: "Sequence[EvictionRule]") -> None:
    """Say where groups keep more than their share, because a store has a block at least."""
    if not config.keeps_by_layer(config.policy):
        return
    block_size = groups[0].block_size
    least = min(rule.share.value for rule in groups if rule.share)
    # What the mean must be beside the recent tokens for the smallest share to come to a block.
    enough = block_size / least + groups[0].protected
    if config.budget_share is not None:
        logger.info(
            "KV eviction: in prompts of less than %d tokens some layers keep a block of %d tokens "
            "and not less, their share; the other layers keep as much less.",
            enough / config.budget_share,
            block_size,
        )
    elif config.budget_tokens is not None and config.budget_tokens < enough:
        lifted = sum(
            rule.share.value * (config.budget_tokens - groups[0].protected) < block_size
            for rule in groups
            if rule.share
        )
        logger.info(
            "KV eviction: at a budget of %d tokens %d of %d groups keep a block of %d tokens and "
            "not less, their share; the other layers keep as much less.",
            config.budget_tokens,
            lifted,
            len(groups),
            block_size,
        )
