"""Extensions of attention on a GPU: requests under policies that count every query or weigh tokens.

The requests of a step are laid out once for all layers, as evicted requests of a mixed batch are.
Steps of a server with such a policy run no FULL graph, because the layout differs by batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.extensions.base import AttentionExtension
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.attention.unpacked import unpacked
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.fp8 import FP8, typed
from vllm_kvevict.ops.triton.every_query import Sequences


@dataclass
class Extended:
    """Requests of a step that an extension runs, and the slot mapping [T'] of their tokens."""

    extension: AttentionExtension
    step: Extend
    slots: torch.Tensor


def extended_requests(
    binding: GroupBinding, buffers: GroupBuffers, common: CommonAttentionMetadata
) -> list[Extended]:
    """Lay out the requests of each extension in a step."""
    extended = []
    for extension, rows, places in binding.extension_requests(common):
        step = buffers.extend(common, rows, places)
        starts = common.query_start_loc_cpu[places].tolist()
        ends = common.query_start_loc_cpu[places + 1].tolist()
        tokens = torch.cat([torch.arange(*span) for span in zip(starts, ends, strict=True)])
        index = async_tensor_h2d(tokens, device=buffers.device)
        extended.append(Extended(extension, step, common.slot_mapping[index].long()))
    return extended


def extend_attention(
    extended: Extended,
    buffers: GroupBuffers,
    cache: LayerCache,
    layer_name: str,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Run an extension in one layer.

    Args:
        extended: The extension and its requests.
        buffers: The group's buffers.
        cache: The cache that the layer reads.
        layer_name: The layer.
        query: [T, query heads, D] of the whole batch.
        kv_cache: [num_blocks, H, block_size, 2 * D].
        output: [T, query heads, D]. It is written at the requests' tokens by an extension that
            replaces vLLM's kernel.

    """
    state, step = buffers.state, extended.step
    index, heads, size = state.layer_index[layer_name], state.num_heads, query.shape[2]
    buffers.write_table(step, index, step.table)
    by_head = output.view(-1, query.shape[1] // heads, size)
    queries = query.to(output.dtype) if query.dtype == FP8 else query
    scale = cache.scale * cache.key_scale * (cache.query_scale if query.dtype == FP8 else 1.0)
    indptr = state.head_indptr[index].index_select(0, step.rows)
    is_evicted = state.tail_start.index_select(0, step.rows) > 0
    stored_pages = (indptr.diff(dim=1) * is_evicted[:, None]).flatten()
    sinks = None if cache.sinks is None else cache.sinks.float().contiguous()
    first = 0
    for part, pages in _parts(kv_cache, cache, step, buffers, index):
        sequences = slice(first, first + len(part.query_start_loc) - 1)
        first = sequences.stop
        batch = Sequences(
            queries=queries.reshape(-1, *by_head.shape[1:]).index_select(0, part.order),
            starts=part.query_start_loc,
            lengths=part.lengths[index],
            pages=typed(pages),
            table=part.table,
            float_table=step.table[sequences],
            stored_pages=stored_pages[sequences],
            heads=heads,
            block_size=state.rule.block_size,
            page_tokens=state.rule.page_tokens,
            max_queries=step.max_query_len,
            longest=step.longest,
            scale=scale,
            softcap=cache.softcap,
            sinks=sinks,
        )
        result = torch.empty_like(batch.queries)
        # All tokens are new to the first part only; the others would lose its sums.
        slots = extended.slots if sequences.start == 0 else extended.slots[:0]
        if extended.extension.forward_on_gpu(state, layer_name, batch, slots, result):
            by_head.index_copy_(0, part.order, result.to(output.dtype))


def _parts(
    kv_cache: torch.Tensor, cache: LayerCache, step: Extend, buffers: GroupBuffers, layer: int
) -> Iterator[tuple[Extend, torch.Tensor]]:
    """Yield the requests with pages of plain tokens: those of the cache, or unpacked ones."""
    if buffers.scratch.packed is None:
        yield step, kv_cache
    else:
        assert cache.centres is not None
        yield from unpacked(kv_cache, cache.centres, step, buffers, layer)
