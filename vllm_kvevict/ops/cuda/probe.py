"""Probe scores on CUDA: scores of keys by a model's probes, with or without the window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch, to_device
from vllm_kvevict.ops.cuda.defensive import window_peaks
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.score import WindowLayers, window_lse
from vllm_kvevict.ops.torch.probe import logged_ages


@dataclass(frozen=True)
class NetworkLayers:
    """Networks that are added to the scores of keys: one hidden layer of U units for each head.

    Args:
        weights: [L, H, D + 4, U] float32, contiguous: weights of the units for an unrotated key's
            dimensions in the order in which they are stored, for its norm, for 1, and for the
            logarithm of the head's share of the norms of the token's values; then the weights of
            the units in the result. U is at least 1.
        shares: [L, H] float32, contiguous: weight of the same logarithm, in addition to the units.

    """

    weights: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True)
class ProbeLayers:
    """Inputs of probes in every layer of a group. C is 1 for keys alone, 2 with a window.

    Args:
        caches: [blocks, H, block_size, 2 * D] contiguous each, float16, bfloat16, float32,
            float8_e4m3fn or float8_e5m2; D is 64, 80, 96, 128 or 256.
        channels: C.
        weights: [L, H, C, D + 4] float32 weights of an unrotated key's dimensions in the order in
            which they are stored, of its norm, of 1, and two that are not read. With prose
            [L, H, 2 * C, D + 4]: the second half are the probes of prose, and the last two weights
            are those of the token's :func:`~vllm_kvevict.ops.torch.probe.age_features`.
        window_weights: [L, H] float32 weights of the logarithms of the window's attention in the
            second of two probes.
        rotary: [positions, R] contiguous each, float32, float16 or bfloat16, with R rotated
            dimensions: cosines, then sines, by position; empty if keys are not rotated. R is a
            multiple of 2 numbers of the cache for each 4 bytes of them.
        interleaved: True if dimensions (2i, 2i + 1) are rotated together, else (i, i + R / 2).
        kept: [pages, page_tokens, at least C] float32 each, contiguous: floats of the tokens of
            stores.
        head_indptr: [L, rows, H + 1] int32 head split before this eviction.
        old_store: [rows, S] int32 stores before this eviction; rows may be strided.
        networks: What is added to each of the C scores; None if they are linear.

    """

    channels: int
    caches: Sequence[torch.Tensor]
    weights: torch.Tensor
    window_weights: torch.Tensor
    rotary: Sequence[torch.Tensor]
    interleaved: bool
    kept: Sequence[torch.Tensor]
    head_indptr: torch.Tensor
    old_store: torch.Tensor
    networks: NetworkLayers | None = None


def mean_ages(due: Due) -> list[float]:
    """Return the means of the logarithms of the scored tokens' ages and of their squares."""
    first, last = due.num_tokens - due.old_tail_start, due.num_tokens - due.tail_start
    if first == last:
        return [0.0, 0.0]
    means: list[float] = logged_ages(torch.arange(first, last, -1, device="cpu")).mean(0).tolist()
    return means


def probe_scores(
    batch: EvictionBatch,
    layers: ProbeLayers,
    window: WindowLayers | None,
    sum_of_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of ``policies/probe.py`` for due evictions.

    Reads each key of the tail once, and twice with networks. Reads each value of the tail once with
    two probes or networks. A window reads all keys twice more. A token's position is its index in
    the request.

    Args:
        batch: The due evictions.
        layers: Caches, probes and tables.
        window: Inputs of the window's attention, with the same caches; None for keys alone.
        sum_of_ranks: Sums a tensor over the tensor-parallel ranks; called once with two probes or
            networks, and otherwise never.

    Returns:
        [batch.columns] float32 scores, protected tokens at 1e30, and [C, batch.columns] float32
        floats of each candidate for :func:`.token_stats.keep_page_values`.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    device, channels = batch.requests.device, layers.channels

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device)

    peaks = empty(0, 0)
    if window is not None:
        peaks = window_peaks(batch, window, window_lse(batch, window))
    longest = max(due.tail_start - due.old_tail_start for due in batch.due)
    parts, scores = empty(channels, batch.columns), empty(batch.columns)
    networks = layers.networks
    by_value = channels > 1 or networks is not None
    norms = empty(batch.columns * by_value)
    totals = empty(len(batch.due), batch.num_layers, longest * by_value)
    ages = empty(len(batch.due), 2)
    if layers.weights.shape[2] > channels:
        ages = to_device([mean_ages(due) for due in batch.due], torch.float32, device)
    tables = (batch.requests, layers.head_indptr, layers.old_store, batch.positional)
    operations(parts).probe_keys(
        parts,
        norms,
        totals,
        list(layers.caches),
        layers.weights,
        ages,
        list(layers.rotary),
        layers.interleaved,
        longest,
        *tables,
        batch.page_tokens,
    )
    if by_value:
        if channels == 1:
            # The launch above computes the norms of values for the second probe only.
            operations(parts).value_norms(
                norms, totals, list(layers.caches), *tables, batch.page_tokens
            )
        totals = sum_of_ranks(totals)
    if networks is not None:
        operations(parts).probe_networks(
            parts,
            norms,
            totals,
            list(layers.caches),
            networks.weights,
            networks.shares,
            list(layers.rotary),
            layers.interleaved,
            *tables,
            batch.page_tokens,
        )
    means = empty(len(batch.due) * batch.num_layers * batch.num_heads)
    operations(parts).probe_scores(
        scores,
        parts,
        means,
        peaks,
        norms,
        totals,
        layers.window_weights,
        list(layers.kept),
        batch.window,
        batch.max_columns,
        *tables,
        batch.block_size,
    )
    return scores, parts
