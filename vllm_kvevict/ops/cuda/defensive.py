"""Defensive scores on CUDA: peaks of the window's attention, times shares of the value norms."""

from collections.abc import Callable, Sequence

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.score import WindowLayers, launch_arguments, window_lse

NEIGHBOURS = 5
"""Number of columns over which a query's weights are averaged."""


def window_peaks(batch: EvictionBatch, layers: WindowLayers, lse: torch.Tensor) -> torch.Tensor:
    """Return the highest sum over neighbours of the weights of any query of the window.

    Reads each key once.

    Args:
        batch: The due evictions.
        layers: Caches, rings and tables.
        lse: [E, L, H, G * w] float32, from :func:`.score.window_lse`.

    Returns:
        [groups, batch.sums] float32: maxima over groups of queries, as in
        :func:`.score.column_sums`.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    peaks = torch.empty(layers.query_groups(batch), batch.sums, device=lse.device)
    operations(peaks).window_peaks(peaks, lse, *launch_arguments(batch, layers))
    return peaks


def value_norms(batch: EvictionBatch, layers: WindowLayers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the values of the tail's tokens, and their sums over the heads.

    Reads each value once.

    Args:
        batch: The due evictions.
        layers: Caches, in which a slot is a key and a value of the same size, and tables.

    Returns:
        [batch.columns] float32 norms, undefined for the tokens of a store; [E, L, longest tail]
        float32 sums, 0 after a shorter tail.

    Raises:
        RuntimeError: A shape, dtype, stride or device differs from :class:`WindowLayers`.

    """
    device = batch.requests.device
    longest = max(due.tail_start - due.old_tail_start for due in batch.due)
    norms = torch.empty(batch.columns, device=device)
    totals = torch.empty(len(batch.due), batch.num_layers, longest, device=device)
    tables = (batch.requests, layers.head_indptr, layers.old_store, batch.positional)
    operations(norms).value_norms(norms, totals, list(layers.caches), *tables, batch.page_tokens)
    return norms, totals


def defensive_scores(
    batch: EvictionBatch,
    layers: WindowLayers,
    kept: Sequence[torch.Tensor],
    sum_of_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of ``policies/defensive.py`` for due evictions.

    Reads each key twice and each value once.

    Args:
        batch: The due evictions.
        layers: Caches, rings and tables.
        kept: [pages, page_tokens, C] float32 each, contiguous. Channel 0 holds the shares of the
            tokens of stores.
        sum_of_ranks: Sums a tensor over the tensor-parallel ranks.

    Returns:
        [batch.columns] float32 scores, protected tokens at 1e30, and shares.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    peaks = window_peaks(batch, layers, window_lse(batch, layers))
    norms, totals = value_norms(batch, layers)
    totals = sum_of_ranks(totals)
    scores, shares = torch.empty_like(norms), torch.empty_like(norms)
    means = torch.empty(len(batch.due) * batch.num_layers * batch.num_heads, device=norms.device)
    operations(scores).defend(
        scores,
        shares,
        means,
        peaks,
        norms,
        totals,
        list(kept),
        batch.window,
        batch.max_columns,
        batch.requests,
        layers.head_indptr,
        layers.old_store,
        batch.positional,
        batch.block_size,
    )
    return scores, shares
