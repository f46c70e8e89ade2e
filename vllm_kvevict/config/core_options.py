"""The settings of a request, read again in the engine core because not all front ends run the
plugin."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.handover import one_token
from vllm_kvevict.config.limits import check_limits, max_blocks_for
from vllm_kvevict.config.names import NONE
from vllm_kvevict.config.requests import BEAM_SEARCH, RequestOptions, asks, parse_options
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction.scheduler")


def read_options(
    request: "Request",
    config: EvictionConfig,
    rules: Sequence[EvictionRule],
    drafts: bool,
    max_model_len: int,
    blocks: int,
    handed_over: bool = False,
) -> RequestOptions:
    """Return the settings of a request; the server's settings if it has none or invalid ones.

    Args:
        request: vLLM's request.
        config: The server's settings.
        rules: The eviction rules of the groups that evict.
        drafts: True if the server uses speculative decoding.
        max_model_len: Maximum length of a sequence in tokens.
        blocks: Number of blocks of the pool for requests.
        handed_over: True if another server reads the blocks of the prompt, which then stay whole.

    """
    if handed_over:
        if request.max_tokens > 1:
            # The front end rejects such requests; only a client of the engine core gets here.
            logger.warning("%s: %s", request.request_id, one_token(request.max_tokens))
            request.max_tokens = 1
        return RequestOptions(NONE)
    sampling = request.sampling_params
    extra = sampling.extra_args if sampling is not None else None
    prompt = request.num_prompt_tokens
    try:
        if extra is not None and BEAM_SEARCH in extra:
            return _of_beam_search(prompt, request.max_tokens, rules, blocks)
        options = parse_options(config, extra, prompt, rules)
        check_limits(options, drafts)
        if asks(extra) and any(rule.prefill_stride for rule in rules):
            # Otherwise, start-up has checked that the longest sequence fits.
            ends = min(prompt + request.max_tokens, max_model_len)
            needed = sum(max_blocks_for(options, rule, prompt, ends) for rule in rules)
            if needed > blocks:
                raise ValueError(f"it may need {needed} blocks of {blocks}")
    except ValueError as error:
        # The front end rejects such requests; only a client of the engine core gets here.
        logger.warning("%s: the server's settings apply (%s)", request.request_id, error)
        return RequestOptions(config.policy, when=config.when)
    return options


def _of_beam_search(
    prompt: int, max_tokens: int, rules: Sequence[EvictionRule], blocks: int
) -> RequestOptions:
    """Return the settings of a request of a beam search, which is never evicted.

    Raises:
        ValueError: It asks for more than one token, or the pool does not hold its prompt.

    """
    needed = sum(blocks_for(prompt + max_tokens, rule.block_size) for rule in rules)
    if max_tokens != 1 or needed > blocks:
        raise ValueError(f"{BEAM_SEARCH} is for prompts that fit, and for one token")
    return RequestOptions(NONE)
