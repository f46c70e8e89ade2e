"""Limits on the settings of requests that apply regardless of the front end.

The front end checks them first, to reject a request when it arrives. The engine core checks them
again, because a front end without the plugin, such as vLLM's Rust one, rejects nothing.
"""

from vllm_kvevict.config.requests import WHEN, WHENS, RequestOptions
from vllm_kvevict.rules.ceiling import max_blocks_ever
from vllm_kvevict.rules.rule import EvictionRule, blocks_for


def check_limits(options: RequestOptions, drafts: bool) -> None:
    """Reject settings that another feature of the server does not allow.

    Args:
        options: The settings that the request asked for.
        drafts: True if the server uses speculative decoding.

    Raises:
        ValueError: A setting is not allowed; the message names the key and its valid values in one
            sentence.

    """
    if drafts and options.when != WHENS[0]:
        raise ValueError(
            f"KV eviction: {WHEN} {options.when} cannot be combined with this server's speculative "
            "decoding, because requests to evict are chosen before drafts are accepted; "
            f"give {WHEN} {WHENS[0]}"
        )


def max_blocks_for(
    options: RequestOptions, rule: EvictionRule, prompt_len: int, max_length: int
) -> int:
    """Return the maximum number of blocks that a request can ever hold in one group.

    Args:
        options: The settings that it asked for.
        rule: The server's eviction rule of the group.
        prompt_len: Tokens of the prompt.
        max_length: Tokens of the prompt and the longest answer.

    """
    if not options.evicts:
        return blocks_for(max_length, rule.block_size)
    on_demand = options.when == "pressure"
    return max_blocks_ever(options.own_rule(rule), prompt_len, max_length, options.at, on_demand)
