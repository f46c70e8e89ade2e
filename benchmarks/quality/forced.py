"""A logits processor that makes a request say given tokens.

`vllm serve --logits-processors benchmarks.quality.forced:ForcedTokens`, and a request whose
`vllm_xargs` hold `forced_tokens`. vLLM takes log-probabilities from the logits before any processor
(`--logprobs-mode raw_logprobs`, its default), so the answer tells what the model thought of each of
these tokens: teacher forcing in decode, where evictions happen as they do in any answer.
"""

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "forced_tokens"


class Follow:
    """Leaves the n-th token of a request no choice."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary] of the next token; tokens beyond the given ones are free."""
        if len(output_ids) >= len(self._tokens):
            return logits
        forced = torch.full_like(logits, float("-inf"))
        forced[self._tokens[len(output_ids)]] = 0
        return forced


class ForcedTokens(AdapterLogitsProcessor):
    """Reads ``forced_tokens``, a list of token ids, from a request's ``vllm_xargs``."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse anything but a list of token ids, with HTTP 400."""
        tokens = (sampling_params.extra_args or {}).get(KEY, [])
        if not isinstance(tokens, list) or not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise ValueError(f"{KEY} must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Follow | None:
        tokens = (params.extra_args or {}).get(KEY)
        return Follow(tokens) if tokens else None
