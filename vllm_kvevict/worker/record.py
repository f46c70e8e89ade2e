"""The record of one eviction that listeners receive."""

from dataclasses import dataclass

import torch

from vllm_kvevict.rules.step_plan import Eviction, GroupEviction


@dataclass(frozen=True)
class EvictionRecord:
    """The tokens that one eviction kept in one group, for tests and plots.

    ``columns`` [L, S * H * page_tokens] index each head's candidates, heads concatenated. The
    candidates are the head's former store and then the tail, after ``padding`` [L, H] padding
    columns. ``pages`` [L, H] are the pages that each head kept. ``scores`` [L, H, N] are the scores
    of the candidates, -inf on padding. ``log_weights`` [L, S * H * page_tokens, 2] are the
    log-weights of each kept token in the numerator and the denominator of attention, None if
    tokens have no weights.
    """

    eviction: Eviction
    group: GroupEviction
    columns: torch.Tensor
    pages: torch.Tensor
    padding: torch.Tensor
    scores: torch.Tensor
    log_weights: torch.Tensor | None = None
