"""fit: values of kept tokens that answer the last queries as all tokens did. Reference."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.sinks import attention_weights

RIDGE = 0.01
"""What is added to the squares of attention weights: a weight far below 0.1 moves no value."""


def value_shift(
    candidates: Candidates, values: torch.Tensor, kept: Sequence[torch.Tensor], rows: int
) -> list[torch.Tensor]:
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
        kept: [K] int64 of each head: the candidates that stay, at least one.
        rows: Queries of each query head, at most ``window``.

    Returns:
        [K, D] float32 of each head, 0 in a head where a key or value is no finite number.

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
    if not bool(candidates.valid.all()):
        logits.masked_fill_(~candidates.valid[:, None], float("-inf"))
    sinks = candidates.sinks
    weights = attention_weights(
        logits, None if sinks is None else sinks.repeat_interleave(rows, dim=1)
    )
    # Heads keep different numbers: behind its last token a head has its first again, of weight 0.
    columns = pad_sequence(list(kept), batch_first=True, padding_value=-1)
    beyond = columns < 0
    columns = columns.clamp(min=0)
    basis = weights.gather(2, columns[:, None].expand(-1, weights.shape[1], -1))
    basis.masked_fill_(beyond[:, None], 0.0)
    held = values.gather(1, columns[..., None].expand(-1, -1, values.shape[2]))
    stays = weights[..., candidates.num_candidates :]
    mass = basis.sum(-1, keepdim=True) + stays.sum(-1, keepdim=True)
    # A sink keeps what it had.
    mass += (1 - weights.sum(-1, keepdim=True)).clamp_(min=0)
    mass.clamp_(min=torch.finfo(torch.float32).tiny)
    few = basis @ held + stays @ values[:, candidates.num_candidates :]
    missing = weights @ values - few / mass
    basis /= mass
    squares = basis @ basis.mT
    squares.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    # It raises nothing: a key or value that is no number must not end the server.
    factor, _ = torch.linalg.cholesky_ex(squares)
    shift = basis.mT @ torch.cholesky_solve(missing, factor)
    known = shift.sum((1, 2)).isfinite()
    if not bool(known.all()):
        shift.masked_fill_(~known[:, None, None], 0.0)
    return [mine[: len(one)] for mine, one in zip(shift, kept, strict=True)]
