"""What a request may not ask for on this server, whoever passes it on.

The front end asks first, to refuse a request where it arrives. The engine core asks again: a front
end that runs no plugin, as vLLM's Rust one, refuses nothing.
"""

from vllm_kvevict.config.requests import WHEN, WHENS, RequestOptions
from vllm_kvevict.timeline.ceiling import max_blocks_ever
from vllm_kvevict.timeline.rule import EvictionRule, blocks_for


def check_limits(options: RequestOptions, drafts: bool) -> None:
    """Refuse what another feature of the server rules out.

    Args:
        options: What the request asked for.
        drafts: Whether the server decodes speculatively.

    Raises:
        ValueError: In one sentence, which key is wrong and what it may be.

    """
    if drafts and options.when != WHENS[0]:
        raise ValueError(
            f"KV eviction: {WHEN} {options.when} cannot be combined with this server's speculative "
            f"decoding, whose drafts are accepted after it is chosen who evicts; give {WHEN} "
            f"{WHENS[0]}"
        )


def max_blocks_for(options: RequestOptions, rule: EvictionRule, prompt_len: int, ends: int) -> int:
    """Most blocks that a request can ever hold in one group.

    Args:
        options: What it asked for.
        rule: The server's timeline of the group.
        prompt_len: Tokens of the prompt.
        ends: Tokens of prompt and longest answer.

    """
    if not options.evicts:
        return blocks_for(ends, rule.block_size)
    on_demand = options.when == "pressure"
    return max_blocks_ever(options.timeline(rule), prompt_len, ends, options.at, on_demand)
