"""A text that reads a context before it is evicted: refused where it cannot, made into tokens."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from vllm_kvevict.settings.memory import drafting_layers, evictable_layers
from vllm_kvevict.settings.requests import PREPARE, PREPARING_ANSWERS, RequestOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers.params import TokenizeParams

    from vllm_kvevict.settings.config import EvictionConfig

_WRAPPED = "_kv_eviction_reads_texts"
_RENDERS = ("render_chat", "render_completion", "render_responses")


def install() -> None:
    """Let the API server tokenise texts as it does prompts, off its event loop. Idempotent."""
    from vllm.renderers.online_renderer import OnlineRenderer

    for name in _RENDERS:
        original = getattr(OnlineRenderer, name)
        if not hasattr(original, _WRAPPED):
            setattr(OnlineRenderer, name, tokenising(original))


def tokenising(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a method that renders requests, so that a text in ``vllm_xargs`` becomes token ids."""

    @wraps(original)
    async def render(self: Any, request: Any, **kwargs: Any) -> Any:
        rendered = await original(self, request, **kwargs)
        xargs: Mapping[str, Any] = request.vllm_xargs or {}
        text = xargs.get(PREPARE)
        if not isinstance(text, str) or not text.strip() or hasattr(rendered, "error"):
            return rendered
        try:
            tokens = await _tokens(self.renderer, text)
        except ValueError as error:
            return self.create_error_response(str(error), param="vllm_xargs")
        request.vllm_xargs = {**xargs, PREPARE: tokens}
        return rendered

    setattr(render, _WRAPPED, True)
    return render


async def _tokens(renderer: Any, text: str) -> list[int]:
    """Token ids of a text, capped before and tokenised where vLLM does so for prompts.

    Raises:
        ValueError: There is no tokenizer, or the text is longer than the model takes.

    """
    with _sentences():
        read = await renderer.tokenize_prompt_async(dict(prompt=text), _how(renderer))
        return list(read["prompt_token_ids"])


def _tokens_here(renderer: Any, text: str) -> list[int]:
    """As :func:`_tokens`, while the caller waits."""
    with _sentences():
        read = renderer.tokenize_prompt(dict(prompt=text), _how(renderer))
        return list(read["prompt_token_ids"])


def _how(renderer: Any) -> "TokenizeParams":
    # Not at import, when vLLM still looks for its platform.
    from vllm.renderers.params import TokenizeParams

    if renderer.tokenizer is None:
        raise ValueError("needs token ids on a server without tokenizer")
    longest = renderer.model_config.max_model_len
    return TokenizeParams(max_total_tokens=longest, add_special_tokens=False)


@contextmanager
def _sentences() -> Iterator[None]:
    """Every complaint names the key."""
    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"KV eviction: {PREPARE}: {error}") from error


def check_preparation(
    vllm_config: "VllmConfig", config: "EvictionConfig", options: RequestOptions, params: Any
) -> None:
    """Refuse a preparation that this server or this request cannot have.

    Raises:
        ValueError: In one sentence, why not.

    """
    from vllm_kvevict.policies.registry import build_policies
    from vllm_kvevict.policies.requirements import shares_stores

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
    elif drafting_layers(vllm_config):
        needs = "a server without layers that draft, beside which no store is shared"
    elif getattr(params, "prompt_logprobs", None) is not None:
        needs = "a request without prompt_logprobs, whose prompt is computed as a whole"
    else:
        return check_length(vllm_config, options)
    raise ValueError(f"KV eviction: {PREPARE} needs {needs}")


def check_length(vllm_config: "VllmConfig", options: RequestOptions) -> None:
    """Refuse tokens that the model's length does not hold behind the context.

    Raises:
        ValueError: In one sentence, how many it holds.

    """
    if isinstance(options.prepare, str):
        return
    assert options.at is not None and options.prepare is not None
    longest, count = vllm_config.model_config.max_model_len, len(options.prepare)
    room = longest - options.at - PREPARING_ANSWERS
    if not 0 < count <= room:
        raise ValueError(
            f"KV eviction: {PREPARE} is {count} tokens long, and behind this context "
            f"--max-model-len {longest} leaves room for 1 to {room}"
        )


def fill_in_tokens(processor: Any, request: Any) -> None:
    """Put token ids in the place of a text that nobody has tokenised yet, as in ``LLM``.

    Args:
        processor: vLLM's ``InputProcessor``.
        request: The ``EngineCoreRequest`` that it made, which has a preparation.

    Raises:
        ValueError: The prompt is more than token ids, no tokenizer is there, or the text is longer
            than the model takes.

    """
    if request.prompt_embeds is not None or request.mm_features:
        raise ValueError(f"KV eviction: {PREPARE} needs a prompt of text alone")
    params = request.sampling_params
    text = params.extra_args[PREPARE]
    if isinstance(text, str):
        tokens = _tokens_here(processor.renderer, text)
        params.extra_args = params.extra_args | {PREPARE: tokens}
