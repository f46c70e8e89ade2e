"""A text that reads a context before it is evicted: refused where it cannot, made into tokens."""

from typing import TYPE_CHECKING, Any

from vllm_kvevict.settings.memory import evictable_layers
from vllm_kvevict.settings.requests import PREPARE, PREPARING_ANSWERS, RequestOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.settings.config import EvictionConfig


def check_preparation(
    vllm_config: "VllmConfig", config: "EvictionConfig", options: RequestOptions, params: Any
) -> None:
    """Refuse a preparation that this server or this request cannot have.

    Raises:
        ValueError: In one sentence, why not.

    """
    from vllm_kvevict.policies.needs import shares_stores
    from vllm_kvevict.policies.registry import build_policies

    policies = build_policies(config)
    suited = [n for n, p in policies.items() if p.needs_window and shares_stores(p)]
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if options.policy not in suited:
        choices = f"of this server: {', '.join(suited)}" if suited else "and this server has none"
        needs = f"a policy that scores by the queries of a window ({choices}), not {options.policy}"
    elif not vllm_config.cache_config.enable_prefix_caching:
        needs = "prefix caching, which this server has switched off"
    elif evictable_layers(vllm_config) < layers:
        needs = "a model whose layers all evict"
    elif getattr(params, "prompt_logprobs", None) is not None:
        needs = "a request without prompt_logprobs, whose prompt is computed as a whole"
    else:
        return
    raise ValueError(f"KV eviction: {PREPARE} needs {needs}")


def fill_in_tokens(processor: Any, request: Any, options: RequestOptions) -> None:
    """Put token ids in the place of a text that reads a request's context.

    Args:
        processor: vLLM's ``InputProcessor``.
        request: The ``EngineCoreRequest`` that it made.
        options: Its settings, which were checked.

    Raises:
        ValueError: The prompt is more than token ids, no tokenizer is there, or the model's length
            does not hold context and text.

    """
    if request.prompt_embeds is not None or request.mm_features:
        raise ValueError(f"KV eviction: {PREPARE} needs a prompt of text alone")
    assert options.at is not None and options.prepare is not None
    tokens = options.prepare
    if isinstance(tokens, str):
        if processor.tokenizer is None:
            raise ValueError(
                f"KV eviction: {PREPARE} needs token ids on a server without tokenizer"
            )
        tokens = tuple(processor.tokenizer.encode(tokens, add_special_tokens=False))
    longest = processor.model_config.max_model_len
    room = longest - options.at - PREPARING_ANSWERS
    if not 0 < len(tokens) <= room:
        raise ValueError(
            f"KV eviction: {PREPARE} is {len(tokens)} tokens long, and behind this context "
            f"--max-model-len {longest} leaves room for 1 to {room}"
        )
    params = request.sampling_params
    params.extra_args = params.extra_args | {PREPARE: list(tokens)}
