"""Allocation: divide the pages of a layer's store between its KV heads. Reference."""

import torch

from vllm_kvevict.ops.torch.preconditions import require
from vllm_kvevict.ops.torch.select import descending


def uniform_pages(caps: torch.Tensor, store_blocks: int) -> torch.Tensor:
    """Return S pages for every head.

    Args:
        caps: [L, H] int64 candidate pages of each head.
        store_blocks: S.

    Returns:
        [L, H] int64.

    Raises:
        ValueError: A head has fewer than S pages of candidates.

    """
    require(
        caps >= store_blocks, lambda: f"a head has fewer than {store_blocks} pages of candidates"
    )
    return torch.full_like(caps, store_blocks)


def shared_pages(shares: torch.Tensor, caps: torch.Tensor, store_blocks: int) -> torch.Tensor:
    """Divide S * H pages by fixed shares with Webster's method.

    Page k of a head has the priority ``share / (k + 1/2)``, and the pages with the highest
    priorities are allocated. If no bound applies, the result is ``S * shares`` rounded to integers.
    Ties go to the lower head.

    Args:
        shares: [L, H] float, above 0.
        caps: [L, H] int64 candidate pages of each head.
        store_blocks: S.

    Returns:
        [L, H] int64, each row summing to ``S * H``, each entry in [1, cap].

    Raises:
        ValueError: The caps of a layer sum to less than ``S * H``.

    """
    num_heads = shares.shape[1]
    # An upper bound of the pages of a head; the priorities of further pages are not needed.
    page = torch.arange(store_blocks * num_heads, device=shares.device)
    gains = shares.double()[..., None] / (page + 0.5)
    return _best_pages(gains, torch.ones_like(caps), caps, store_blocks * num_heads)


def adaptive_pages(
    scores: torch.Tensor, caps: torch.Tensor, store_blocks: int, block_size: int, floor: float
) -> torch.Tensor:
    """Return the S * H pages of each layer that hold the highest scores (Ada-KV Theorem 3.3).

    The sorted scores of each head are divided into pages. The gain of a page is the sum of its
    scores, and gains decrease along a head, so the S * H pages with the highest gains are the
    optimum among all allocations of whole pages. With ``block_size`` 1 this is Algorithm 1 of the
    paper. Ties go to the lower head, then to the lower page. A head with NaN scores ranks last.

    Args:
        scores: [L, H, N] float32, -inf on padding.
        caps: [L, H] int64 candidate pages of each head, at most ``N // block_size``.
        store_blocks: S.
        block_size: Tokens in a page.
        floor: Share of S, in [0, 1], that every head keeps; at least one page, and at most the
            head's cap.

    Returns:
        [L, H] int64, each row summing to ``S * H``.

    Raises:
        ValueError: A size is out of range, or the caps of a layer sum to less than ``S * H``.

    """
    num_pages = scores.shape[2] // block_size
    if store_blocks < 1 or not 0 <= floor <= 1:
        raise ValueError("store_blocks must be at least 1, and floor in [0, 1]")
    require(caps <= num_pages, lambda: f"caps {caps.tolist()} are above {num_pages} pages per head")

    # Tokens after the last whole page have the lowest scores of their head.
    ordered = descending(scores)[..., : num_pages * block_size]
    gains = ordered.unflatten(-1, (num_pages, block_size)).double().sum(-1)
    limits = torch.finfo(gains.dtype)
    gains = gains.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    guaranteed = torch.full_like(caps, max(1, int(floor * store_blocks)))
    return _best_pages(gains, guaranteed, caps, store_blocks * scores.shape[1])


def _best_pages(
    gains: torch.Tensor, guaranteed: torch.Tensor, caps: torch.Tensor, total: int
) -> torch.Tensor:
    """Return [L, H] pages, ``total`` per layer: guaranteed ones, then those of highest gain.

    ``gains`` is [L, H, P].
    """
    require(caps.sum(-1) >= total, lambda: f"caps {caps.tolist()} cannot hold {total} pages")
    num_pages = gains.shape[2]
    page = torch.arange(num_pages, device=gains.device)
    gains = gains.masked_fill(page < guaranteed[..., None], float("inf"))
    gains = gains.masked_fill(page >= caps[..., None], float("-inf"))
    # Only the number of chosen pages is used, so rounding of the sums cannot reorder pages.
    best = gains.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, :total]
    chosen = torch.zeros_like(gains, dtype=torch.int64).flatten(1)
    return chosen.scatter_(1, best, 1).view(gains.shape).sum(-1)
