"""What an eviction tells whoever listens."""

from dataclasses import dataclass

import torch

from vllm_kvevict.timeline.step_plan import Eviction, GroupEviction


@dataclass(frozen=True)
class EvictionRecord:
    """What one eviction kept, for tests and pictures.

    ``columns`` [L, S * H * block_size] index each head's candidates, heads concatenated;
    candidates are the head's former store and then the tail, behind ``padding`` [L, H]
    padding columns. ``pages`` [L, H] are the pages each head kept. ``scores`` [L, H, N] are those
    of the candidates, -inf on padding. ``log_weights``
    [L, S * H * block_size, 2] are what each kept token counts for in the numerator and the
    denominator of attention, None where it counts for itself.
    """

    eviction: Eviction
    group: GroupEviction
    columns: torch.Tensor
    pages: torch.Tensor
    padding: torch.Tensor
    scores: torch.Tensor
    log_weights: torch.Tensor | None = None
