"""Which policy and which budget each run of a prompt has, and whether it will evict."""

from vllm_kvevict.calibrate.read_prompt import Prompt
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import AUTO
from vllm_kvevict.serving.command import CommandError
from vllm_kvevict.tools.inspect.options import Options


def variants(options: Options, config: EvictionConfig) -> list[EvictionConfig]:
    """The settings of every run: both policies, the server's first, at each budget.

    Args:
        options: What to run.
        config: The server's settings.

    Raises:
        CommandError: Both policies are the same.

    """
    if options.compare == config.policy:
        raise CommandError(
            f"--compare {options.compare}: the other policy is {config.policy} too; name another, "
            "or give --kv-eviction"
        )
    policies = (config.policy, options.compare) if options.compare else (config.policy,)
    return [
        config.model_copy(update=dict(policy=policy, budget=budget))
        for policy in policies
        for budget in options.budgets or (config.budget,)
    ]


def check_length(options: Options, config: EvictionConfig, prompt: Prompt) -> None:
    """Refuse what is known not to evict before the model is loaded.

    Raises:
        CommandError: The prompt is too short for a budget, or both policies are the same.

    """
    decoded = len(prompt.ids) + options.max_tokens
    end = prompt.context if options.after == "prefill" else decoded
    # The budget of auto may be that of a profile, which is not read yet.
    known = config.policy != AUTO or options.budgets
    for one in variants(options, config):
        if known and not one.rule(block_size=1).evictable(end):
            raise CommandError(too_short(options, one, end, prompt.context))


def too_short(
    options: Options, config: EvictionConfig, end: int, context: int, block_size: int = 1
) -> str:
    """Why ``end`` tokens, of which ``context`` precede the eviction point, were not evicted."""
    rule = config.rule(block_size)
    needed = rule.store_blocks(context) * rule.page_tokens + rule.protected
    # A share of the memory that could hold all tokens frees blocks without evicting any.
    needed += 0 if rule.may_keep_all else block_size
    blocks = f" in blocks of {block_size}" if block_size > 1 else ""
    return (
        f"nothing was evicted, because {end} tokens fit the budget of {rule.budget(context)} "
        f"tokens per KV head (eviction starts at {needed} tokens{blocks}); give a longer prompt "
        f"or lower {'--budgets' if options.budgets else '--kv-eviction-budget'}"
    )
