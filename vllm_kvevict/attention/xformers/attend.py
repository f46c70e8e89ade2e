"""xformers' memory-efficient attention of evicted requests, one sequence per (request, KV head).

xformers' biases hold lengths twice: as tensors, which its ops read on the GPU, and as Python
numbers, which only bound launches. The Python numbers are set to upper bounds here, so the host
does not wait for the GPU.
"""

import math
from functools import lru_cache

import torch
from torch.nn.functional import pad
from xformers.ops.fmha import cutlass, triton_splitk
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
)
from xformers.ops.fmha.common import AttentionFwOpBase, Inputs

from vllm_kvevict.attention.kernels import power_of_two
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.attention.xformers.parts import SPLITS, Part
from vllm_kvevict.ops.triton.gather import gather_pages

MIN_SPLIT = 256
"""Minimum number of keys in a split of the paged op."""


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    step: Extend,
    lengths: torch.Tensor,
    scale: float,
    table: torch.Tensor,
    dense: torch.Tensor | None,
) -> None:
    """Compute attention as :meth:`OptionalKernel.attend`.

    Args:
        query: [queries, G, D], ordered by sequence.
        kv_cache: [num_blocks, H, block_size, 2 * D], contiguous.
        out: [queries, G, D], written in place.
        step: The sequences.
        lengths: [N] int32 cached tokens.
        scale: Factor of query-key products.
        table: Buffer that begins with the page table of the step.
        dense: Buffer of gathered pages; None if the sequences have one query each and the paged op
            runs them.

    Raises:
        ValueError: Queries and cache differ in dtype or device.

    """
    pages = kv_cache.view(-1, *kv_cache.shape[2:])
    if dense is None:
        _on_pages(query, pages, out, step, lengths, scale, table)
        return
    for part in step.parts:
        _gathered(query, pages, out, step, part, lengths[part.first : part.last], scale, dense)


def _on_pages(
    query: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    step: Extend,
    lengths: torch.Tensor,
    scale: float,
    table: torch.Tensor,
) -> None:
    sequences, group, _ = query.shape
    # The op is compiled for every number of sequences, so empty ones pad it to a power of two.
    padded = power_of_two(sequences)
    page, width = pages.shape[1], step.table.shape[1] * pages.shape[1]
    bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=_single_queries(padded, query.device),
        k_seqinfo=_keys(pad(lengths, (0, padded - sequences)), width),
        block_tables=table[:padded, : step.table.shape[1]],
        page_size=page,
    )
    keys, values = _heads(pages.flatten(0, 1), group)
    op = triton_splitk.FwOp.get_operator(splits_of(padded, width), block_n=math.gcd(64, page))
    queries = pad(query, (0, 0, 0, 0, 0, padded - sequences))
    inputs = Inputs(queries[None, :, None], keys[:, :, None], values[:, :, None], bias, scale=scale)
    out.copy_(_run(op, inputs)[0, :sequences, 0])


def _gathered(
    query: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    step: Extend,
    part: Part,
    lengths: torch.Tensor,
    scale: float,
    dense: torch.Tensor,
) -> None:
    shape = (part.last - part.first, step.table.shape[1], *pages.shape[1:])
    dense = dense.view(pages.dtype)[: math.prod(shape)].view(shape)
    gather_pages(pages, step.table[part.first : part.last], lengths, dense)
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=_SeqLenInfo(part.on_device, part.longest, 0, part.starts),
        k_seqinfo=_keys(lengths, shape[1] * shape[2]),
    )
    keys, values = _heads(dense.flatten(0, 2), query.shape[1])
    queries = query[None, part.begin : part.end]
    result = _run(cutlass.FwOp, Inputs(queries, keys, values, bias, scale=scale))
    out[part.begin : part.end] = result[0]


def _run(op: type[AttentionFwOpBase], inputs: Inputs) -> torch.Tensor:
    """Return the op's result, in the shape of the queries.

    ``memory_efficient_attention_forward`` refuses every op if xformers' C++ library does not load,
    for example with a PyTorch for another CUDA version. These two ops do not need it, because their
    code is in Triton and in PyTorch.
    """
    inputs.validate_inputs()
    result: torch.Tensor = op.apply(inputs, needs_gradient=False)[0]
    return result.view(inputs.query.shape)


def splits_of(sequences: int, width: int) -> int:
    """Return the splits of each sequence's ``width`` keys: enough for a GPU, and not too small."""
    max_splits = min(SPLITS // sequences, width // MIN_SPLIT, 64)
    return power_of_two(max_splits + 1) // 2 if max_splits > 1 else 1


def _heads(tokens: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [1, tokens, G, D], expanded over G, of ``tokens`` [tokens, 2 * D]."""
    expanded = tokens[None, :, None].expand(1, -1, group, -1)
    keys, values = expanded.chunk(2, dim=-1)
    return keys, values


def _keys(lengths: torch.Tensor, width: int) -> _PaddedSeqLenInfo:
    """Return the key lengths of N sequences of ``lengths`` [N] int32, at a stride of ``width``."""
    starts, on_host = _starts(len(lengths), width, lengths.device)
    return _PaddedSeqLenInfo(
        seqstart=starts,
        max_seqlen=width,
        min_seqlen=0,
        seqstart_py=on_host,
        seqlen=lengths,
        seqlen_py=[width] * len(lengths),
        padding=width,
    )


@lru_cache(maxsize=64)
def _single_queries(sequences: int, device: torch.device) -> _SeqLenInfo:
    starts, on_host = _starts(sequences, 1, device)
    return _SeqLenInfo(starts, 1, 1, on_host)


@lru_cache(maxsize=64)
def _starts(sequences: int, width: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    on_host = list(range(0, sequences * width + 1, width))
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * width, on_host
