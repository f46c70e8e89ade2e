"""score: attention of the observation window over the cached tokens, and its pooling. Reference."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.sinks import attention_weights

LOGITS = 2**20
"""Most logits that stand in memory at once, unless :data:`FEWEST` rows have more: 4 MiB."""

FEWEST = 16
"""Rows of a block at least: with fewer a product would wait for the keys."""


def window_attention(candidates: Candidates) -> torch.Tensor:
    """Mean attention weight that the window's queries give each token before the window.

    Ada-KV section 3.4 (SnapKV), and 3.5 for the mean over the query heads of a group.

    Returns:
        [H, num_candidates + r] float32; 0 where ``valid`` is False.

    Raises:
        ValueError: The candidates carry no queries, or not ``window`` of them.

    """
    columns = candidates.valid.shape[1] - candidates.window
    sums = torch.zeros(candidates.num_heads, columns, device=candidates.valid.device)
    for head in range(candidates.num_heads):
        for weights in window_rows(candidates, head):
            sums[head] += weights[:, :columns].sum(0)
    assert candidates.queries is not None
    return sums / (candidates.queries.shape[1] * candidates.window)


def window_rows(candidates: Candidates, head: int) -> Iterator[torch.Tensor]:
    """Attention weights of the window's queries on what one KV head holds, some rows at a time.

    Row ``g * w + i`` belongs to query head g of the group and query i of the window. It is 0 where
    the head holds no token as old as the query. A block has
    :data:`FEWEST` rows, or more while they are no more than :data:`LOGITS` logits: what stands
    in memory grows with the columns only.

    Yields:
        [b, columns] float32, each row summing to 1, or less beside a sink; as
        :func:`head_attention`. G * w rows in all.

    Raises:
        ValueError: The candidates carry no queries, or not ``window`` of them.

    """
    queries, window = candidates.queries, candidates.window
    if queries is None or queries.shape[2] != window:
        raise ValueError(f"window attention needs the queries of the last {window} tokens")
    keys = candidates.keys[head].float().T
    valid = candidates.valid[head]
    columns, padding = len(valid), ~valid
    rows = queries[head].float().flatten(0, 1) * candidates.scale
    own = torch.arange(len(rows), device=keys.device)[:, None] % window
    ahead = torch.arange(window, device=keys.device) > own
    sinks = None
    if candidates.sinks is not None:
        sinks = candidates.sinks[head].repeat_interleave(window)
    blind = own < padding.sum() - (columns - window)
    count = max(FEWEST, LOGITS // columns)
    for begin in range(0, len(rows), count):
        block, hidden = rows[begin : begin + count], ahead[begin : begin + count]
        logits = block @ keys
        if candidates.softcap:
            logits = logits.div_(candidates.softcap).tanh_().mul_(candidates.softcap)
        logits[:, columns - window :].masked_fill_(hidden, float("-inf"))
        logits.masked_fill_(padding, float("-inf"))
        mine = None if sinks is None else sinks[begin : begin + count]
        yield attention_weights(logits, mine).masked_fill_(blind[begin : begin + count], 0.0)


def head_attention(candidates: Candidates, head: int, rows: int) -> torch.Tensor:
    """Attention weights of the last ``rows`` queries on everything that one KV head holds.

    Args:
        candidates: One layer of one request.
        head: KV head.
        rows: Queries, at most ``window``.

    Returns:
        [G, rows, columns] float32, each row summing to 1, or less beside a sink; 0 where
        ``valid`` is False, and on the columns after the query's own.

    Raises:
        ValueError: The candidates carry no queries, or not ``window`` of them.

    """
    queries, keys, window = candidates.queries, candidates.keys[head], candidates.window
    if queries is None or queries.shape[2] != window:
        raise ValueError(f"window attention needs the queries of the last {window} tokens")
    columns = keys.shape[0]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=keys.device).tril(columns - rows)
    logits = queries[head, :, window - rows :].float() @ keys.float().T * candidates.scale
    if candidates.softcap:
        logits = torch.tanh(logits / candidates.softcap) * candidates.softcap
    seen &= candidates.valid[head]
    logits.masked_fill_(~seen, float("-inf"))
    sinks = None if candidates.sinks is None else candidates.sinks[head, :, None]
    return attention_weights(logits, sinks).masked_fill_(~seen.any(-1, keepdim=True), 0.0)


def pool(scores: torch.Tensor, valid: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """Smooth scores along the sequence, each row as if it had no padding columns.

    The average counts missing neighbours at both ends as zeros, as kvpress's SnapKVPress does.

    Args:
        scores: [H, N] float32.
        valid: [H, N] bool: False on the padding at the left.
        kernel: Width in tokens, odd; 1 for none.
        kind: "max" or "avg".

    Returns:
        [H, N] float32, -inf where ``valid`` is False.

    Raises:
        ValueError: The kernel is even or below 1, or the kind is unknown.

    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"pooling kernel must be odd and at least 1, not {kernel}")
    if kind == "max":
        filled = scores.masked_fill(~valid, float("-inf"))
        pooled = functional.max_pool1d(filled, kernel, stride=1, padding=kernel // 2)
    elif kind == "avg":
        filled = scores.masked_fill(~valid, 0.0)
        pooled = functional.avg_pool1d(filled, kernel, stride=1, padding=kernel // 2)
    else:
        raise ValueError(f"pooling must be max or avg, not {kind!r}")
    return pooled.masked_fill(~valid, float("-inf"))
