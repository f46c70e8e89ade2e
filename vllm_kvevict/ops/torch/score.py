"""Window scores: attention of the observation window over the cached tokens. Reference."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.torch.sinks import attention_weights

LOGITS = 2**20
"""Maximum number of logits in memory at once, 4 MiB, unless :data:`MIN_ROWS` rows have more. The
caches of a CPU hold them."""

DEVICE_LOGITS = 2**24
"""The same on a GPU, 64 MiB: an operation then takes longer than its launch."""

MIN_ROWS = 16
"""Minimum number of rows of a block. With fewer, a product is bound by reading the keys."""


def window_attention(candidates: Candidates) -> torch.Tensor:
    """Return the mean attention weight of the window's queries to each token before the window.

    Ada-KV section 3.4 (SnapKV), and section 3.5 for the mean over the query heads of a group.

    Returns:
        [H, num_candidates + r] float32; 0 if ``valid`` is False.

    Raises:
        ValueError: The candidates do not have ``window`` queries.

    """
    columns = candidates.valid.shape[1] - candidates.window
    sums = torch.zeros(candidates.num_heads, columns, device=candidates.valid.device)
    for heads, _, weights in window_weights(candidates):
        sums[heads] += weights[..., :columns].sum(1)
    assert candidates.queries is not None
    return sums / (candidates.queries.shape[1] * candidates.window)


def logits_at_once(device: torch.device) -> int:
    """Return the maximum number of logits in memory at once on a device."""
    return LOGITS if device.type == "cpu" else DEVICE_LOGITS


def window_weights(candidates: Candidates) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield the attention weights of the window's queries to the cached tokens, in blocks of rows.

    Row ``g * w + i`` belongs to query head g of the group and query i of the window. It is 0 if
    the head holds no token up to the query's position. A block has all rows of several heads, with
    at most :func:`logits_at_once` logits, or at least :data:`MIN_ROWS` rows of one head, so memory
    grows with the number of columns only.

    Yields:
        Heads, some of their G * w rows, and [h, b, columns] float32 weights of these rows, valid
        until the next block. Each row sums to 1, or to less with a sink.

    Raises:
        ValueError: The candidates do not have ``window`` queries.

    """
    queries, window, valid = candidates.queries, candidates.window, candidates.valid
    if queries is None or queries.shape[2] != window:
        raise ValueError(f"window attention needs the queries of the last {window} tokens")
    columns = valid.shape[1]
    rows = queries.float().flatten(1, 2) * candidates.scale
    own = torch.arange(rows.shape[1], device=rows.device) % window
    ahead = torch.arange(window, device=rows.device) > own[:, None]
    # On a GPU the host does not look, because it would wait.
    padding = ~valid if candidates.padded and not (valid.is_cpu and bool(valid.all())) else None
    most = logits_at_once(valid.device)
    sinks, buffers = candidates.sinks, candidates.buffers
    if sinks is not None:
        sinks = sinks.repeat_interleave(window, dim=1)
    heads_at_once = max(1, most // (rows.shape[1] * columns))
    rows_at_once = rows.shape[1] if heads_at_once > 1 else max(MIN_ROWS, most // columns)
    for head in range(0, len(rows), heads_at_once):
        heads = slice(head, head + heads_at_once)
        keys = buffers.floats("keys", candidates.keys[heads]).mT
        for begin in range(0, rows.shape[1], rows_at_once):
            block = slice(begin, begin + rows_at_once)
            shape = (len(keys), len(own[block]), columns)
            logits = buffers.take("logits", shape, keys.device)
            torch.bmm(rows[heads, block], keys, out=logits)
            if candidates.softcap:
                logits = logits.div_(candidates.softcap).tanh_().mul_(candidates.softcap)
            logits[..., columns - window :].masked_fill_(ahead[block], float("-inf"))
            if padding is not None:
                logits.masked_fill_(padding[heads, None], float("-inf"))
            weights = attention_weights(
                logits,
                None if sinks is None else sinks[heads, block],
                buffers.take("weights", shape, keys.device),
            )
            del logits
            if padding is not None:
                held = columns - padding[heads].sum(-1, keepdim=True)
                weights.masked_fill_((own[block] < window - held)[..., None], 0.0)
            yield heads, block, weights


def last_query_attention(candidates: Candidates) -> torch.Tensor:
    """Return the attention weights of the last query of each query head to all cached tokens.

    At most :func:`logits_at_once` numbers of the keys are in memory as float32 at once, unless one
    head has more.

    Returns:
        [H, G, columns] float32, each row summing to 1, or to less with a sink; 0 if ``valid`` is
        False.

    Raises:
        ValueError: The candidates do not have ``window`` queries.

    """
    queries, window, valid = candidates.queries, candidates.window, candidates.valid
    if queries is None or queries.shape[2] != window:
        raise ValueError(f"window attention needs the queries of the last {window} tokens")
    rows = queries[:, :, -1].float() * candidates.scale
    width = max(rows.shape[1:])
    at_once = max(1, logits_at_once(valid.device) // (width * valid.shape[1]))
    blocks = []
    for head in range(0, len(rows), at_once):
        heads = slice(head, head + at_once)
        logits = torch.bmm(rows[heads], candidates.keys[heads].float().mT)
        if candidates.softcap:
            logits = logits.div_(candidates.softcap).tanh_().mul_(candidates.softcap)
        if candidates.padded:
            logits.masked_fill_(~valid[heads, None], float("-inf"))
        sinks = None if candidates.sinks is None else candidates.sinks[heads]
        blocks.append(attention_weights(logits, sinks))
    return torch.cat(blocks)


def pool(scores: torch.Tensor, valid: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """Pool scores along the sequence, ignoring the padding columns of each row.

    The average counts missing neighbours at both ends as zeros, as kvpress's SnapKVPress does.

    Args:
        scores: [H, N] float32.
        valid: [H, N] bool: False on the padding at the left.
        kernel: Width in tokens, odd; 1 for none.
        kind: "max" or "avg".

    Returns:
        [H, N] float32, -inf if ``valid`` is False.

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
