"""fit: values of kept tokens that answer the last queries as all tokens did. Reference."""

import torch

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.sinks import attention_weights

RIDGE = 0.01
"""What is added to the squares of attention weights: a weight far below 0.1 moves no value."""


def value_shift(
    candidates: Candidates, values: torch.Tensor, kept: torch.Tensor, rows: int
) -> torch.Tensor:
    """What to add to the values of kept tokens, so that the last queries lose less.

    With fewer tokens attention gives other outputs. Of all values of the kept candidates those are
    taken, by ridge regression in closed form, that bring the outputs of the last ``rows`` queries
    back to what all tokens gave. Keys stay, and so do tokens that were no candidates.

    Attention Matching (arXiv:2602.16284) fits the values of a compacted cache by least squares.
    This departs from it: its queries are many and from a pass of their own, these are the last
    few; so the values are drawn to what they were, and the kept tokens' masses are not fitted.

    Args:
        candidates: One layer of one request, with keys and queries.
        values: [H, columns, D] float32 of the same columns; finite where ``valid`` is False.
        kept: [H, num_candidates] bool.
        rows: Queries of each query head, at most ``window``.

    Returns:
        [H, num_candidates, D] float32, 0 where ``kept`` is False, and in a head where a key or
        value is no finite number.

    Raises:
        ValueError: The candidates carry no queries, or fewer than ``rows``.

    """
    queries = candidates.queries
    if queries is None or queries.shape[2] < rows:
        raise ValueError(f"values are fitted to the last {rows} queries")
    group = queries.shape[1]
    asked = queries[:, :, queries.shape[2] - rows :].float().flatten(1, 2) * candidates.scale
    logits = asked @ candidates.keys.float().mT
    if candidates.softcap:
        logits = logits.div_(candidates.softcap).tanh_().mul_(candidates.softcap)
    last = torch.arange(rows, device=logits.device)
    logits[..., -rows:].masked_fill_(last > last.repeat(group)[:, None], float("-inf"))
    logits.masked_fill_(~candidates.valid[:, None], float("-inf"))
    sinks = candidates.sinks
    weights = attention_weights(
        logits, None if sinks is None else sinks.repeat_interleave(rows, dim=1)
    )
    stays = torch.ones_like(candidates.valid)
    stays[:, : kept.shape[1]] = kept
    seen = weights * stays[:, None]
    # A sink keeps what it had.
    beside = (1 - weights.sum(-1, keepdim=True)).clamp_(min=0)
    seen /= (seen.sum(-1, keepdim=True) + beside).clamp_(min=torch.finfo(torch.float32).tiny)
    missing = (weights - seen) @ values
    basis = seen[..., : kept.shape[1]]
    squares = basis @ basis.mT
    squares.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    # It raises nothing: a key or value that is no number must not end the server.
    factor, _ = torch.linalg.cholesky_ex(squares)
    shift = basis.mT @ torch.cholesky_solve(missing, factor)
    known = shift.isfinite().flatten(1).all(1)
    return shift.masked_fill_(~known[:, None, None], 0.0)
