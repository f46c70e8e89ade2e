"""Window scores on CUDA: attention of the observation window over the cached tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.limits import CHUNK, rows_at_once
from vllm_kvevict.ops.cuda.packed import format_arguments
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat


@dataclass(frozen=True)
class WindowLayers:
    """Inputs of the window's attention in every layer of a group.

    Args:
        caches: [blocks, H, block_size, slot] contiguous each; a slot begins with the key. The
            dtype is that of the rings, float8_e4m3fn or float8_e5m2.
        rings: [slots * w, query heads, D] contiguous each, float16, bfloat16 or float32; D is 64,
            80, 96, 128 or 256.
        scales: Softmax scale of each layer, times the key scale of a quantised cache.
        head_indptr: [L, rows, H + 1] int32 head split before this eviction.
        old_store: [rows, S] int32 stores before this eviction; rows may be strided.
        softcap: Logit soft cap, 0 for none.
        token_format: Format of the tokens of stores. One in few bits needs caches of the dtype of
            the rings, to which its keys are rounded.
        centres: [L, H, D] float32, without which such a format stores keys, contiguous.

    """

    caches: Sequence[torch.Tensor]
    rings: Sequence[torch.Tensor]
    scales: Sequence[float]
    head_indptr: torch.Tensor
    old_store: torch.Tensor
    softcap: float = 0.0
    token_format: TokenFormat = AS_CACHED
    centres: torch.Tensor | None = None

    def query_rows(self, batch: EvictionBatch) -> int:
        """Return G * w; row r is query head ``r // w`` of the group and query ``r % w``."""
        return self.rings[0].shape[1] // batch.num_heads * batch.window

    def query_groups(self, batch: EvictionBatch) -> int:
        """Return the number of groups of query rows; the keys are read once for each group."""
        return -(-self.query_rows(batch) // rows_at_once(self.rings[0].shape[2]))


def window_lse(batch: EvictionBatch, layers: WindowLayers) -> torch.Tensor:
    """Return the log-sum-exp of every window query over the tokens up to it.

    Reads each key once.

    Returns:
        [E, L, H, G * w] float32, natural logarithm.

    Raises:
        RuntimeError: A shape, dtype, stride or device differs from :class:`WindowLayers`.

    """
    rows, count = layers.query_rows(batch), len(batch.due)
    device = batch.requests.device
    heads = (count, batch.num_layers, batch.num_heads)
    lse = torch.empty(*heads, rows, device=device)
    chunks = -(-batch.max_columns // CHUNK)
    partial = torch.empty(lse.numel() // rows, chunks, rows, 2, device=device)
    operations(batch.requests).window_lse(lse, partial, *launch_arguments(batch, layers))
    return lse


def column_sums(batch: EvictionBatch, layers: WindowLayers, lse: torch.Tensor) -> torch.Tensor:
    """Return the weight of each token before the window, summed over the window's queries.

    NACL Algorithm 2: ``sum_r exp(q_r . k * scale - lse_r)``. Reads each key once.

    Args:
        batch: The due evictions.
        layers: Caches, rings and tables.
        lse: [E, L, H, G * w] float32, natural logarithm, in the row order of
            :meth:`WindowLayers.query_rows`: from :func:`window_lse` or from an attention kernel.

    Returns:
        [groups, batch.sums] float32 partial sums over groups of queries. There is one group unless
        a KV head has more than 256 query rows (128 with a head size of 256).

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    sums = torch.empty(layers.query_groups(batch), batch.sums, device=batch.requests.device)
    operations(sums).column_sums(sums, lse, *launch_arguments(batch, layers))
    return sums


def pool(
    batch: EvictionBatch,
    sums: torch.Tensor,
    head_indptr: torch.Tensor,
    factor: float,
    kernel: int,
    kind: Literal["max", "avg"],
) -> torch.Tensor:
    """Pool column sums as ``pool`` of ``ops/torch``, and set the scores of protected tokens.

    Args:
        batch: The due evictions.
        sums: [groups, batch.sums] float32, from :func:`column_sums`.
        head_indptr: [L, rows, H + 1] int32 head split before this eviction.
        factor: Factor of every sum; ``1 / (G * w)`` for the mean.
        kernel: Width in tokens, odd; 1 for none.
        kind: "max" or "avg".

    Returns:
        [batch.columns] float32 scores of the candidates.

    Raises:
        ValueError: The kind is unknown.
        RuntimeError: The kernel is even, or a shape, dtype or device is not as above.

    """
    if kind not in ("max", "avg"):
        raise ValueError(f"pooling must be max or avg, not {kind!r}")
    scores = torch.empty(batch.columns, device=sums.device)
    operations(sums).pool(
        scores,
        sums,
        batch.requests,
        head_indptr,
        batch.block_size,
        batch.page_tokens,
        batch.window,
        batch.max_columns,
        factor,
        kernel,
        kind == "avg",
    )
    return scores


def window_scores(
    batch: EvictionBatch, layers: WindowLayers, kernel: int = 7, kind: Literal["max", "avg"] = "max"
) -> torch.Tensor:
    """Return SnapKV's scores of due evictions: ``pool`` of ``window_attention`` of ``ops/torch``.

    Ada-KV sections 3.4 and 3.5. Reads each key twice.

    Args:
        batch: The due evictions.
        layers: Caches, rings and tables.
        kernel: Width of the pooling in tokens, odd; 1 for none.
        kind: "max" or "avg".

    Returns:
        [batch.columns] float32, protected tokens at 1e30.

    """
    sums = column_sums(batch, layers, window_lse(batch, layers))
    return pool(batch, sums, layers.head_indptr, 1 / layers.query_rows(batch), kernel, kind)


def launch_arguments(batch: EvictionBatch, layers: WindowLayers) -> tuple[object, ...]:
    """Return the arguments of the passes over the keys that follow their results."""
    return (
        list(layers.caches),
        list(layers.rings),
        list(layers.scales),
        layers.softcap,
        batch.window,
        batch.max_columns,
        batch.requests,
        layers.head_indptr,
        layers.old_store,
        batch.positional,
        batch.page_tokens,
        *format_arguments(
            layers.token_format, layers.rings[0].shape[2], layers.centres, batch.requests.device
        ),
    )
