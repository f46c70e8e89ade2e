"""Warm-up of attention with evicted requests, so that no kernel compiles while serving.

vLLM's own warm-up has no evicted requests. Triton compiles separate kernels for addresses and
numbers that are multiples of 16 and for others, so each step runs with several numbers of requests.
The decode kernel has another pipeline for many sequences, which these numbers do not reach.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.gpu_extensions import Extended
from vllm_kvevict.attention.gpu_step import EvictingMetadata
from vllm_kvevict.attention.sequences import Recording
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.rules.rule import blocks_for

_MULTIPLE = 16
_NULL_BLOCK = 0


@torch.inference_mode()
def warm_up(
    layers: Sequence[Any], binding: GroupBinding, buffers: GroupBuffers, dtype: torch.dtype
) -> None:
    """Run every code path of evicted requests over vLLM's null block, without lasting effects.

    The rows of the state that are used are cleared afterwards. Ring slot 0 is overwritten.

    Args:
        layers: Attention layers of the group, with their caches bound.
        binding: The binding of the group.
        buffers: The buffers of the group.
        dtype: The model's dtype.

    """
    state = buffers.state
    num_rows = len(state.tail_start)
    sizes = {1, 2, _MULTIPLE // gcd(_MULTIPLE, state.num_heads)}
    rows = torch.arange(min(num_rows, max(sizes)))
    device = state.tail_start.device
    pages = torch.ones(len(state.layer_names), state.num_heads, dtype=torch.int64, device=device)
    store = torch.full((1,), _NULL_BLOCK, dtype=torch.int64, device=device)
    start = _store_blocks(buffers) * state.rule.block_size
    for row in rows.tolist():
        state.record(row, start, store, pages)
    for requests in sorted(size for size in sizes if size <= num_rows):
        for step in _steps(rows[:requests], binding, buffers):
            for layer in layers:
                _forward(layer, step, dtype)
    state.clear(rows.tolist())


def _store_blocks(buffers: GroupBuffers) -> int:
    """Return the number of positional blocks whose tokens fill one store page of each head."""
    rule = buffers.state.rule
    return blocks_for(rule.page_tokens, rule.block_size)


def _steps(
    rows: torch.Tensor, binding: GroupBinding, buffers: GroupBuffers
) -> list[EvictingMetadata]:
    """Return decode steps, and mixed steps with one and with two query tokens per request."""
    places = torch.arange(len(rows))
    single, several = (_common(rows, count, buffers) for count in (1, 2))
    steps: list[EvictingMetadata] = []
    recordings: list[Recording] = []
    resident = buffers.scratch.resident
    all_stages = sorted({resident.few, resident.many})
    for by_slices in {True, buffers.scratch.by_slices(1)}:
        decode, recording = buffers.decode(single, rows, None, by_slices)
        for stages in all_stages if by_slices else (1,):
            step = EvictingMetadata(binding, buffers, len(rows))
            step.decode = replace(decode, stages=stages)
            steps.append(step)
            recordings.append(recording)
    decode = buffers.some_decode(single, rows, places)
    for stages in all_stages:
        mixed = EvictingMetadata(binding, buffers, len(rows))
        mixed.decode = replace(decode, stages=stages)
        steps.append(mixed)
    extend = EvictingMetadata(binding, buffers, 2 * len(rows))
    extend.extend = buffers.extend(several, rows, places)
    steps.append(extend)
    steps += _extended(rows, binding, buffers)
    if binding.records:
        for step, recording in zip(steps, recordings, strict=False):
            step.recording = recording
        slots = torch.full_like(rows, -1)
        slots[0] = 0
        extend.recording = buffers.recording(several, slots, buffers.state.rule.window)
    return steps


def _extended(
    rows: torch.Tensor, binding: GroupBinding, buffers: GroupBuffers
) -> list[EvictingMetadata]:
    """Return steps of extensions of attention, in the two sizes of their tiles of queries."""
    steps, places = [], torch.arange(len(rows))
    for count in (1, _MULTIPLE + 1):
        common = _common(rows, count, buffers)
        for extension in binding.extensions:
            step = EvictingMetadata(binding, buffers, count * len(rows))
            # Slots of the null block: the floats of its tokens are reset.
            extended = Extended(
                extension, buffers.extend(common, rows, places), common.slot_mapping
            )
            step.extended = [extended]
            steps.append(step)
    return steps


def _common(rows: torch.Tensor, count: int, buffers: GroupBuffers) -> CommonAttentionMetadata:
    """Return a batch with ``count`` query tokens per request, all after its store."""
    requests, blocks, device = len(rows), _store_blocks(buffers), buffers.device
    length = blocks * buffers.state.rule.block_size + count
    starts = torch.arange(requests + 1, dtype=torch.int32) * count
    tokens = requests * count
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=count,
        max_seq_len=length,
        block_table_tensor=torch.full(
            (requests, blocks + blocks_for(count, buffers.state.rule.block_size)),
            _NULL_BLOCK,
            device=device,
            dtype=torch.int32,
        ),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )


def _forward(layer: Any, step: EvictingMetadata, dtype: torch.dtype) -> None:
    impl, shape = layer.impl, step.buffers.scratch.shape
    heads = (step.num_actual_tokens, impl.num_heads, shape.head_size)
    output = torch.zeros(heads, dtype=dtype, device=step.buffers.device)
    query = output.to(FP8) if layer.query_quant is not None else output.clone()
    key = query[:, : impl.num_kv_heads]
    impl.forward(layer, query, key, key, layer.kv_cache, step, output)
