"""A layer's budget shared between its heads in pages of any size, on scores alone."""

from dataclasses import dataclass

import torch

from vllm_kvevict.ops.reference.allocate import adaptive_pages, uniform_pages
from vllm_kvevict.ops.reference.select import select_tokens

UNIT = 32
"""Totals are multiples of this, so that every page size below divides them."""


@dataclass(frozen=True)
class Split:
    """Who gets a layer's budget: pages of ``page`` tokens; ``floor`` None for equal heads."""

    page: int
    floor: float | None

    def __str__(self) -> str:
        if self.floor is None:
            return "equal"
        return f"adaptive, page {self.page}, floor {self.floor:g}"


EQUAL = Split(UNIT, None)
SPLITS = (
    EQUAL,
    Split(1, 0.0), Split(1, 0.2), Split(1, 0.8),
    Split(16, 0.2), Split(32, 0.0), Split(32, 0.2),
)  # fmt: skip


def keep_mask(scores: torch.Tensor, split: Split, units: int, point: int) -> torch.Tensor:
    """[L, H, point] bool: what stays of each head when it is evicted at ``point``.

    Args:
        scores: [L, H, N] float32 of the candidates.
        split: Who gets the budget.
        units: Budget per head, in units of :data:`UNIT` tokens, on average.
        point: Tokens in the cache; those behind the candidates stay.

    """
    layers, heads, columns = scores.shape
    caps = torch.full((layers, heads), columns // split.page)
    store = units * UNIT // split.page
    if split.floor is None:
        pages = uniform_pages(caps, store)
    else:
        pages = adaptive_pages(scores, caps, store, split.page, split.floor)
    chosen = select_tokens(scores, pages, split.page)
    mask = torch.zeros(layers, heads, point, dtype=torch.bool)
    mask[:, :, columns:] = True
    for layer in range(layers):
        head = torch.arange(heads).repeat_interleave(pages[layer] * split.page)
        mask[layer, head, chosen[layer]] = True
    return mask


def spread(attention: torch.Tensor, share: float = 0.9) -> list[list[float]]:
    """[L][H]: share of the candidates that holds ``share`` of a head's attention."""
    ordered = attention.sort(dim=-1, descending=True).values
    mass = ordered.cumsum(-1) / ordered.sum(-1, keepdim=True)
    return ((mass < share).sum(-1) / attention.shape[-1]).tolist()


def found(ids: tuple[int, ...], needle: list[int]) -> slice | None:
    """Where ``needle`` first stands in ``ids``."""
    for start in range(len(ids) - len(needle) + 1):
        if list(ids[start : start + len(needle)]) == needle:
            return slice(start, start + len(needle))
    return None
