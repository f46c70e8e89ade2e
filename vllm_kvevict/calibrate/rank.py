"""How much of all layers' best tokens each layer and head has: shares of the budget."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.torch.allocate import adaptive_pages

DIGITS = 4


def kept(scores: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the tokens that each head keeps if all heads of all layers share the budget.

    Ada-KV's Algorithm 1 over the heads of the whole model instead of a layer's: the tokens with
    the highest scores, at least one a head.

    Args:
        scores: [L, H, N] float32.
        tokens: Mean over heads.

    Returns:
        [L, H] int64 that sum to ``tokens * L * H``.

    """
    layers, heads, columns = scores.shape
    caps = torch.full((1, layers * heads), columns, device=scores.device)
    pages = adaptive_pages(scores.flatten(0, 1)[None], caps, tokens, 1, 0.0)
    return pages.view(layers, heads)


def mean_shares(prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[L, H] float64 of mean 1: shares of all heads, each prompt counting as much.

    Args:
        prompts: [L, H] counts of :func:`kept`, one a prompt.

    """
    return torch.stack([counts / counts.double().mean() for counts in prompts]).mean(0)


def by_layer(shares: torch.Tensor) -> list[float]:
    """Shares of the layers, of mean 1."""
    return _rounded(shares.mean(1))


def by_head(shares: torch.Tensor) -> list[list[float]]:
    """Shares of the KV heads within their layers, of mean 1 in each."""
    return [_rounded(row / row.mean()) for row in shares]


def spread(prompts: Sequence[torch.Tensor]) -> float:
    """Return the mean difference of a layer's share from the mean over prompts."""
    each = torch.stack([(counts / counts.double().mean()).mean(1) for counts in prompts])
    return round(float((each - each.mean(0)).abs().mean()), DIGITS)


def _rounded(shares: torch.Tensor) -> list[float]:
    # A file may hold no share of 0.
    return [max(round(share, DIGITS), 10**-DIGITS) for share in shares.tolist()]
