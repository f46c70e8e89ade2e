"""allocate: share the pages of a layer's store between its KV heads. Reference."""

import torch


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
    num_layers, num_heads, columns = scores.shape
    num_pages, total = columns // block_size, store_blocks * num_heads
    if store_blocks < 1 or columns % block_size or not 0 <= floor <= 1:
        raise ValueError("store_blocks must be at least 1, N whole pages, and floor in [0, 1]")
    if bool((caps.sum(-1) < total).any()) or bool((caps > num_pages).any()):
        raise ValueError(f"caps {caps.tolist()} cannot hold {total} of {num_pages} pages a head")

    ordered = scores.sort(dim=-1, descending=True).values
    gains = ordered.unflatten(-1, (num_pages, block_size)).double().sum(-1)
    limits = torch.finfo(gains.dtype)
    gains = gains.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)

    page = torch.arange(num_pages, device=scores.device)
    guaranteed = max(1, int(floor * store_blocks))
    gains = gains.masked_fill(page < guaranteed, float("inf"))
    gains = gains.masked_fill(page >= caps[..., None], float("-inf"))

    # Only the number of chosen pages counts: a head keeps its first pages however sums round.
    best = gains.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, :total]
    chosen = torch.zeros(num_layers, num_heads * num_pages, dtype=torch.int64, device=scores.device)
    return chosen.scatter_(1, best, 1).view(num_layers, num_heads, num_pages).sum(-1)
