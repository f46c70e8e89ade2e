"""What each request asked for, read once in the engine core."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.requests import PREPARE, RequestOptions, parse_options

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction.scheduler")

OPTIONS = "_kv_eviction_options"
"""Attribute of vLLM's ``Request`` that keeps what it asked for."""


def options_of(
    request: "Request", config: EvictionConfig, rules: Sequence[Timeline]
) -> RequestOptions:
    """The settings of a request; the server's where it has none or wrong ones.

    Args:
        request: vLLM's request, which keeps them.
        config: The server's settings.
        rules: The timelines of the groups that evict.

    """
    options: RequestOptions | None = getattr(request, OPTIONS, None)
    if options is None:
        sampling = request.sampling_params
        extra = sampling.extra_args if sampling is not None else None
        try:
            options = parse_options(config, extra, request.num_prompt_tokens, rules)
            if isinstance(options.prepare, str):
                raise ValueError(f"the front end left the tokens of {PREPARE} open")
        except ValueError as error:
            # Refused at the front door; only a client of the engine core gets here.
            logger.warning("%s: the server's settings apply (%s)", request.request_id, error)
            options = RequestOptions(config.policy, when=config.when)
        setattr(request, OPTIONS, options)
    return options


def prepared_by(options: RequestOptions) -> tuple[int, ...]:
    """Tokens that read the context of a request before it is evicted; empty for none."""
    assert not isinstance(options.prepare, str)
    return options.prepare or ()
