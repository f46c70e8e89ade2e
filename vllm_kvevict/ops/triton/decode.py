"""Decode attention that reads ``head_indptr``, store and tail blocks, in one launch. Triton.

Each request has one query token, and every (request, KV head) pair is a sequence. Keys are read at
the addresses that these tables give, without a page table. The launch has as many programs as run
at once, and they take splits of the sequences from a queue (:mod:`.splits`). The program that ends
the last split of a sequence merges its splits, so no program waits. This is the split-KV method of
Flash-Decoding (Dao et al., 2023), with a fixed grid and one launch instead of two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.triton.merge import MERGED, Partials, merge_splits
from vllm_kvevict.ops.triton.splits import TILE, Splits

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Ring:
    """Ring entries to which the queries of a step are written, for a later eviction.

    Args:
        entries: [ring slots * window, H * G, D] contiguous, of one layer, written at entry
            ``slot * window + position % window``; FP8 queries are widened, without their scale.
        slots: [R] int32, -1 for a request that is not recorded.
        seq_lens: [batch] int32 lengths, this step's token included.
        window: Queries in a slot.

    """

    entries: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    window: int


# Slices of tables have any address and a row stride that depends on the batch. With specialization,
# a kernel for each alignment would be compiled while serving.
@triton.jit(
    do_not_specialize=["num_sequences", "stores_row", "table_row"],
    do_not_specialize_on_alignment=[
        *("rows", "places", "tokens", "head_indptr", "block_table", "slots", "seq_lens"),
        *("lengths", "size", "starts", "queue"),
    ],
)
def _attend_kernel(
    query,
    cache,
    out,
    partial,
    weights,
    arrived,
    taken,
    rows,
    places,
    tokens,
    tail_start,
    stores,
    head_indptr,
    block_table,
    lengths,
    size,
    starts,
    queue,
    sinks,
    rings,
    slots,
    seq_lens,
    num_sequences,
    scale,
    softcap,
    value_scale,
    window,
    query_token,
    query_head,
    out_token,
    out_head,
    stores_row,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_AT_ONCE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    RECORD: tl.constexpr,
    LOG2E: tl.constexpr,
    FP8: tl.constexpr,
):
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    queries_used = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    total = tl.load(starts + num_sequences)
    keys_per_split = tl.load(size)
    item = tl.program_id(0)
    while item < total:
        sequence = tl.load(queue + item * 2)
        split = tl.load(queue + item * 2 + 1)
        request = sequence // HEADS
        head = sequence % HEADS
        first_split = tl.load(starts + sequence)
        last_split = tl.load(starts + sequence + 1)
        alone = last_split == first_split + 1
        begin = split * keys_per_split
        end = tl.minimum(begin + keys_per_split, tl.load(lengths + sequence))
        row = tl.load(rows + request).to(tl.int64)
        place = tl.load(places + request).to(tl.int64)
        tail = tl.load(tail_start + row, mask=row >= 0, other=0)
        indptr = head_indptr + row * (HEADS + 1) + head
        first_page = tl.load(indptr, mask=tail > 0, other=0)
        pages = tl.load(indptr + 1, mask=tail > 0, other=0) - first_page

        own_head = head * GROUP + group
        token = tl.load(tokens + request).to(tl.int64)
        query_at = token * query_token + own_head[:, None] * query_head + dim[None, :]
        q = tl.load(query + query_at, mask=queries_used, other=0.0)
        if FP8:
            # Exact, because float16 and bfloat16 represent every number of float8_e4m3fn.
            q = q.to(out.dtype.element_ty)
        if RECORD:
            slot = tl.load(slots + request)
            entry = slot.to(tl.int64) * window + (tl.load(seq_lens + place) - 1) % window
            ring_at = (entry * (HEADS * GROUP) + own_head[:, None]) * DIM + dim[None, :]
            tl.store(
                rings + ring_at,
                q.to(rings.dtype.element_ty),
                mask=queries_used & (split == 0) & (slot >= 0),
            )
        best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP_PAD], tl.float32)
        if SINKS and alone:
            best = tl.load(sinks + own_head, mask=group < GROUP, other=0.0) * LOG2E
            weight = tl.full([GROUP_PAD], 1.0, tl.float32)
        sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for base in range(begin, end, TILE):
            key = base + tl.arange(0, TILE)
            used = key < end
            page = key // PAGE
            in_store = page < pages
            flat = first_page + page
            kept = tl.load(stores + row * stores_row + flat // HEADS, mask=used & in_store, other=0)
            tail_block = tail // PAGE + page - pages
            later = tl.load(
                block_table + place * table_row + tail_block, mask=used & (page >= pages), other=0
            )
            physical = tl.where(
                in_store,
                kept.to(tl.int64) * HEADS + flat % HEADS,
                later.to(tl.int64) * HEADS + head,
            )
            start = physical * (PAGE * 2 * DIM) + (key % PAGE) * (2 * DIM)
            at = start[:, None] + dim[None, :]
            read = used[:, None] & (dim < DIM)[None, :]
            keys = tl.load(cache + at, mask=read, other=0.0).to(q.dtype)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            if SOFTCAP:
                # tanh by the sigmoid, because Triton has no tanh.
                logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
            logits = tl.where(used[None, :], logits * LOG2E, float("-inf"))
            new_best = tl.maximum(best, tl.max(logits, 1))
            share = tl.exp2(logits - new_best[:, None])
            decay = tl.exp2(best - new_best)
            weight = weight * decay + tl.sum(share, 1)
            values = tl.load(cache + at + DIM, mask=read, other=0.0).to(q.dtype)
            sums = sums * decay[:, None] + tl.dot(
                share.to(values.dtype), values, input_precision="ieee"
            )
            best = new_best
        # All threads wait for the result of this atomic, so it is issued before the stores below.
        item = tl.num_programs(0) + tl.atomic_add(taken, 1, sem="relaxed")
        out_at = token * out_token
        if alone:
            # A sequence without keys is padding. Its result is 0, as in FlashAttention.
            result = sums * (value_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            at_out = out_at + own_head[:, None] * out_head + dim[None, :]
            tl.store(out + at_out, result.to(out.dtype.element_ty), mask=queries_used)
        else:
            at_split = tl.cast(first_split + split, tl.int64) * GROUP + group
            tl.store(weights + at_split * 2, best, mask=group < GROUP)
            tl.store(weights + at_split * 2 + 1, weight, mask=group < GROUP)
            tl.store(partial + at_split[:, None] * DIM + dim[None, :], sums, mask=queries_used)
            # All threads must have written before one of them signals it to the GPU.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + sequence, 1, sem="acq_rel")
            tl.debug_barrier()
            if before == last_split - first_split - 1:
                tl.store(arrived + sequence, 0)
                merge_splits(
                    partial,
                    weights,
                    sinks,
                    out,
                    out_at,
                    first_split,
                    last_split,
                    head,
                    value_scale,
                    out_head,
                    GROUP,
                    DIM,
                    DIM_PAD,
                    MERGE_ROWS,
                    MERGE_AT_ONCE,
                    SINKS,
                    LOG2E,
                )
    # The last program resets the counters, because a graph runs every layer with them.
    if tl.atomic_add(taken + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(taken, 0)
        tl.store(taken + 1, 0)


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    tail_start: torch.Tensor,
    stores: torch.Tensor,
    head_indptr: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    splits: Splits,
    layer: int,
    partials: Partials,
    scale: float,
    softcap: float,
    programs: int,
    stages: int,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> None:
    """Compute attention of one query token per request, in one layer.

    Args:
        query: [T, H * G, D], dimensions contiguous; of any type with an FP8 cache.
        cache: [num_blocks, H, block_size, 2 * D] contiguous: layout LBHNC, keys then values. Its
            type is that of the queries, or float8_e4m3fn.
        out: [T, H * G, D] of any float type, dimensions contiguous; written at ``tokens``.
        rows: [R] int32 state rows, -1 for none.
        places: [R] int32 batch indices, which are rows of ``block_table``.
        tokens: [R] int32 index of each request's token in ``query`` and ``out``.
        tail_start: [rows] int32.
        stores: [rows, S] int32 store blocks.
        head_indptr: [rows, H + 1] int32 of this layer, contiguous.
        block_table: [batch, W] int32 positional blocks.
        lengths: [>= R * H] int32 of this layer (:func:`.splits.head_lengths`).
        splits: The plan of all layers (:func:`.splits.plan_splits`) for R * H sequences.
        layer: Index of the layer in the plan.
        partials: Scratch buffers, which no other launch may use at the same time.
        scale: Factor of query-key products, scales of an FP8 cache's keys and queries included.
        softcap: Logit soft cap, 0 for none.
        programs: Programs of the launch: as many as the GPU runs at once (:mod:`.residency`).
        stages: The kernel's ``num_stages``.
        value_scale: Scale of an FP8 cache's values.
        sinks: [H * G] float32 attention sinks, contiguous; None for none.
        ring: Ring entries to which the queries are written as well; None for none.

    Raises:
        ValueError: The cache is not contiguous, its type is not the query's, or shapes differ.

    """
    heads, page = cache.shape[1], cache.shape[2]
    query_heads, dim = query.shape[1], query.shape[2]
    if not cache.is_contiguous() or cache.shape[3] != 2 * dim:
        raise ValueError(
            f"decode attention needs a contiguous cache [blocks, heads, block size, {2 * dim}], "
            f"not {tuple(cache.shape)} with strides {cache.stride()}"
        )
    quantised = cache.dtype == FP8
    if cache.dtype != query.dtype and not quantised:
        raise ValueError(f"queries are {query.dtype} and the KV cache is {cache.dtype}")
    if query_heads % heads or query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"{query_heads} query heads do not fit {heads} KV heads, or are strided")
    sums, group = partials.sums, query_heads // heads
    if tuple(sums.shape[1:]) != (group, dim) or not sums.is_contiguous():
        raise ValueError(f"scratch {tuple(sums.shape)} does not fit queries of {query.shape}")
    dim_pad = max(16, triton.next_power_of_2(dim))
    rows_merged = triton.next_power_of_2(group)
    _attend_kernel[(programs,)](
        query,
        cache,
        out,
        sums,
        partials.weights,
        partials.arrived,
        partials.taken,
        rows,
        places,
        tokens,
        tail_start,
        stores,
        head_indptr,
        block_table,
        lengths,
        splits.size[layer:],
        splits.starts[layer],
        splits.queue[layer],
        partials.weights if sinks is None else sinks,
        out if ring is None else ring.entries,
        rows if ring is None else ring.slots,
        rows if ring is None else ring.seq_lens,
        rows.shape[0] * heads,
        scale,
        softcap or 1.0,
        value_scale,
        1 if ring is None else ring.window,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        stores.stride(0),
        block_table.stride(0),
        HEADS=heads,
        GROUP=group,
        # The smallest tile of the tensor cores has 16 rows.
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PAD=dim_pad,
        MERGE_ROWS=rows_merged,
        MERGE_AT_ONCE=max(1, MERGED // (rows_merged * dim_pad)),
        PAGE=page,
        TILE=TILE,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        RECORD=ring is not None,
        LOG2E=_LOG2E,
        FP8=quantised,
        num_warps=4,
        num_stages=stages,
    )
