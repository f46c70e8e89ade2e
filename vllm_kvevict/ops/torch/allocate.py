"""allocate: share the pages of a layer's store between its KV heads. Reference."""

import torch

from vllm_kvevict.ops.torch.select import descending


def uniform_pages(caps: torch.Tensor, store_blocks: int) -> torch.Tensor:
    """S pages for every head.

    Args:
        caps: [L, H] int64: pages of candidates each head has.
        store_blocks: S.

    Returns:
        [L, H] int64.

    Raises:
        ValueError: A head has fewer than S pages of candidates.

    """
    if bool((caps < store_blocks).any()):
        raise ValueError(f"a head has fewer than {store_blocks} pages of candidates")
    return torch.full_like(caps, store_blocks)


def shared_pages(shares: torch.Tensor, caps: torch.Tensor, store_blocks: int) -> torch.Tensor:
    """S * H pages by fixed shares: each next page goes to the head that is furthest behind.

    The whole numbers nearest to ``S * shares`` (Webster's method: page k of a head is worth its
    share over k + 1/2), where no bound is in the way. Ties go to the lower head.

    Args:
        shares: [L, H] float, above 0.
        caps: [L, H] int64: pages of candidates each head has.
        store_blocks: S.

    Returns:
        [L, H] int64, each row summing to ``S * H``, each entry in [1, cap].

    Raises:
        ValueError: The caps of a layer sum to less than ``S * H``.

    """
    num_heads = shares.shape[1]
    # No head can have more: each of the others keeps a page.
    page = torch.arange(store_blocks * num_heads, device=shares.device)
    gains = shares.double()[..., None] / (page + 0.5)
    return _best_pages(gains, torch.ones_like(caps), caps, store_blocks * num_heads)


def adaptive_pages(
    scores: torch.Tensor, caps: torch.Tensor, store_blocks: int, block_size: int, floor: float
) -> torch.Tensor:
    """The S * H pages of each layer that hold the highest scores (Ada-KV Theorem 3.3).

    Each head's scores, sorted, are cut into pages; the gain of a page is the sum of its
    scores, which falls along a head. So the best S * H pages of all heads are the optimum
    among all splits into whole pages. With ``block_size`` 1 this is the paper's Algorithm 1.
    Ties go to the lower head, then the lower page. A head whose scores are NaN ranks last.

    Args:
        scores: [L, H, N] float32, N a multiple of ``block_size``, -inf on padding.
        caps: [L, H] int64: pages of candidates each head has, at most ``N // block_size``.
        store_blocks: S.
        block_size: Tokens in a page.
        floor: Share of S, in [0, 1], that every head keeps; never less than one page, and
            never more than the head's cap.

    Returns:
        [L, H] int64, each row summing to ``S * H``.

    Raises:
        ValueError: A size is out of range, or the caps of a layer sum to less than ``S * H``.

    """
    columns = scores.shape[2]
    num_pages = columns // block_size
    if store_blocks < 1 or columns % block_size or not 0 <= floor <= 1:
        raise ValueError("store_blocks must be at least 1, N whole pages, and floor in [0, 1]")
    if bool((caps > num_pages).any()):
        raise ValueError(f"caps {caps.tolist()} are above {num_pages} pages a head")

    ordered = descending(scores)
    gains = ordered.unflatten(-1, (num_pages, block_size)).double().sum(-1)
    limits = torch.finfo(gains.dtype)
    gains = gains.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    guaranteed = torch.full_like(caps, max(1, int(floor * store_blocks)))
    return _best_pages(gains, guaranteed, caps, store_blocks * scores.shape[1])


def _best_pages(
    gains: torch.Tensor, guaranteed: torch.Tensor, caps: torch.Tensor, total: int
) -> torch.Tensor:
    """[L, H] pages: what is guaranteed, then the best of ``gains`` [L, H, P], ``total`` a layer."""
    if bool((caps.sum(-1) < total).any()):
        raise ValueError(f"caps {caps.tolist()} cannot hold {total} pages")
    num_pages = gains.shape[2]
    page = torch.arange(num_pages, device=gains.device)
    gains = gains.masked_fill(page < guaranteed[..., None], float("inf"))
    gains = gains.masked_fill(page >= caps[..., None], float("-inf"))
    # Only the number of chosen pages counts: a head keeps its first pages however sums round.
    best = gains.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, :total]
    chosen = torch.zeros_like(gains, dtype=torch.int64).flatten(1)
    return chosen.scatter_(1, best, 1).view(gains.shape).sum(-1)
