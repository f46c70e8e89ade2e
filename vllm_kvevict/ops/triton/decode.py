"""Decode attention that reads ``head_indptr``, store and tail blocks, in one launch. Triton.

Each request has one query token, and every (request, KV head) pair is a sequence. Keys are read at
the addresses that these tables give, without a page table. The launch has as many programs as run
at once, and each has a slice of all keys (:mod:`.slices`), so it may hold the end of a sequence,
whole sequences, and the beginning of another. The program that ends the last piece of a sequence
merges its partial results, so no program waits. This is the split-KV method of Flash-Decoding (Dao
et al., 2023), with a fixed grid and one launch instead of two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.triton.merge import MERGED, Partials, merge_pieces, place_of
from vllm_kvevict.ops.triton.packed import NOT_PACKED, PackedStores, load_columns, ones
from vllm_kvevict.ops.triton.slices import (
    BEGIN,
    END,
    FIRST_PAGE,
    MORE,
    OWNER,
    PIECES,
    PLACE,
    ROW,
    SEQUENCE,
    STORED,
    TAIL_BLOCK,
    TILE,
    TOKEN,
    WORDS,
    Slices,
)
from vllm_kvevict.ops.triton.softmax import base_2
from vllm_kvevict.ops.triton.stored import attend_stored

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


@triton.jit
def _descriptor(at, exists):
    """Return what differs between the pieces of a program; no load depends on another."""
    row = tl.load(at + ROW, mask=exists, other=0)
    place = tl.load(at + PLACE, mask=exists, other=0)
    token = tl.load(at + TOKEN, mask=exists, other=0)
    first_page = tl.load(at + FIRST_PAGE, mask=exists, other=0)
    stored = tl.load(at + STORED, mask=exists, other=0)
    tail_block = tl.load(at + TAIL_BLOCK, mask=exists, other=0)
    end = tl.load(at + END, mask=exists, other=0)
    pieces = tl.load(at + PIECES, mask=exists, other=0)
    more = tl.load(at + MORE, mask=exists, other=0)
    return row, place, token, first_page, stored, tail_block, end, pieces, more


@triton.jit
def _attend_tile(
    q, keys, values, used, best, weight, sums, scale, softcap,
    SOFTCAP: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the online softmax, wherever they were read from."""
    factor = scale if SOFTCAP else scale * LOG2E
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
    logits = base_2(logits, used, softcap, SOFTCAP, LOG2E)
    new_best = tl.maximum(best, tl.max(logits, 1))
    share = tl.exp2(logits - new_best[:, None])
    decay = tl.exp2(best - new_best)
    weight = weight * decay + tl.sum(share, 1)
    sums = sums * decay[:, None]
    sums += tl.dot(share.to(values.dtype), values, input_precision="ieee")
    return new_best, weight, sums


# Slices of tables have any address and a row stride that depends on the batch. With specialization,
# a kernel for each alignment would be compiled while serving.
@triton.jit(
    do_not_specialize=["stores_row", "table_row"],
    do_not_specialize_on_alignment=["block_table", "slots", "seq_lens"],
)
def _attend_kernel(
    query,
    cache,
    out,
    partial,
    weights,
    arrived,
    descriptors,
    stores,
    block_table,
    sinks,
    rings,
    slots,
    seq_lens,
    words,
    rotation,
    centres,
    one,
    scale,
    softcap,
    value_scale,
    rotation_scale,
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
    WORDS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    RECORD: tl.constexpr,
    LOG2E: tl.constexpr,
    FP8: tl.constexpr,
    STORE_PAGE: tl.constexpr,
    STORE_TILES: tl.constexpr,
    STORE_LANES: tl.constexpr,
    STORE_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    queries_used = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    program = tl.program_id(0)
    first = descriptors + program * WORDS
    sequence = tl.load(first + SEQUENCE)
    begin = tl.load(first + BEGIN)
    owner = tl.load(first + OWNER)
    row, place, token, first_page, stored, tail_block, end, pieces, more = _descriptor(first, True)
    exists = sequence >= 0
    while exists:
        following = descriptors + (tl.num_programs(0) + sequence + 1) * WORDS
        exists = more != 0
        # The next descriptor is on its way while keys are read.
        (
            next_row, next_place, next_token, next_page, next_stored, next_tail, next_end,
            next_pieces, next_more,
        ) = _descriptor(following, exists)  # fmt: skip
        request = sequence // HEADS
        head = sequence % HEADS
        alone = pieces == 1
        own_head = head * GROUP + group
        # A program waits where it first uses what it loads, so all is loaded before that.
        if RECORD:
            slot = tl.load(slots + request)
            seq_len = tl.load(seq_lens + place)
        if SINKS:
            sink = tl.load(sinks + own_head, mask=group < GROUP, other=0.0)
        if KEY_BITS > 0:
            signs = load_columns(rotation, DIM, DIM_PAD)
            # For every row, because a conversion of one row would wait for it.
            centre_at = (head * DIM + dim)[None, :] + 0 * group[:, None]
            centre = tl.load(centres + centre_at, mask=queries_used, other=0.0)
        query_at = token.to(tl.int64) * query_token + own_head[:, None] * query_head + dim[None, :]
        q = tl.load(query + query_at, mask=queries_used, other=0.0)
        if FP8:
            # Exact, because float16 and bfloat16 represent every number of float8_e4m3fn.
            q = q.to(out.dtype.element_ty)
        if RECORD:
            entry = slot.to(tl.int64) * window + (seq_len - 1) % window
            ring_at = (entry * (HEADS * GROUP) + own_head[:, None]) * DIM + dim[None, :]
            tl.store(
                rings + ring_at,
                q.to(rings.dtype.element_ty),
                mask=queries_used & (begin == 0) & (slot >= 0),
            )
        best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP_PAD], tl.float32)
        if SINKS:
            best = tl.where(alone, sink * LOG2E, best)
            weight = tl.where(alone, 1.0, weight)
        sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        own_stores = stores + row.to(tl.int64) * stores_row
        own_table = block_table + place.to(tl.int64) * table_row + tail_block
        # Keys below ``stored`` are in the store, and the others are in the tail.
        rest = begin
        if KEY_BITS > 0:
            if begin < stored:
                best, weight, sums = attend_stored(
                    q, words, one, rotation, signs, rotation_scale, centre, own_stores,
                    first_page, begin, tl.minimum(end, stored), best, weight, scale, softcap,
                    HEADS, DIM, DIM_PAD, STORE_PAGE, STORE_TILES, STORE_LANES, STORE_BYTES,
                    KEY_BITS, VALUE_BITS, GROUPS, SPREAD, SOFTCAP, LOG2E,
                )  # fmt: skip
            rest = tl.maximum(begin, stored)
        for base in range(rest, end, TILE):
            key = base + tl.arange(0, TILE)
            used = key < end
            if KEY_BITS > 0:
                key = key - stored
                later = tl.load(own_table + key // PAGE, mask=used, other=0)
                physical = later.to(tl.int64) * HEADS + head
            else:
                in_store = key < stored
                flat = first_page + key // PAGE
                kept = tl.load(own_stores + flat // HEADS, mask=used & in_store, other=0)
                later = tl.load(
                    own_table + (key - stored) // PAGE, mask=used & (key >= stored), other=0
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
            values = tl.load(cache + at + DIM, mask=read, other=0.0).to(q.dtype)
            best, weight, sums = _attend_tile(
                q, keys, values, used, best, weight, sums, scale, softcap, SOFTCAP, LOG2E
            )
        out_at = token.to(tl.int64) * out_token
        if alone:
            # A sequence without keys is padding. Its result is 0, as in FlashAttention.
            result = sums * (value_scale / tl.where(weight > 0, weight, 1.0))[:, None]
            at_out = out_at + own_head[:, None] * out_head + dim[None, :]
            tl.store(out + at_out, result.to(out.dtype.element_ty), mask=queries_used)
        else:
            at_piece = place_of(owner, program - owner).to(tl.int64) * GROUP + group
            tl.store(weights + at_piece * 2, best, mask=group < GROUP)
            tl.store(weights + at_piece * 2 + 1, weight, mask=group < GROUP)
            tl.store(partial + at_piece[:, None] * DIM + dim[None, :], sums, mask=queries_used)
            # All threads must have written before one of them signals it to the GPU.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + owner, 1, sem="acq_rel")
            tl.debug_barrier()
            if before == pieces - 1:
                # Of the next layer, which a graph runs with the same counter.
                tl.store(arrived + owner, 0)
                merge_pieces(
                    partial,
                    weights,
                    sinks,
                    out,
                    out_at,
                    owner,
                    pieces,
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
        sequence += 1
        row, place, token = next_row, next_place, next_token
        first_page, stored, tail_block = next_page, next_stored, next_tail
        end, pieces, more = next_end, next_pieces, next_more
        # The following sequences begin in this program.
        begin, owner = 0, program


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    stores: torch.Tensor,
    block_table: torch.Tensor,
    slices: Slices,
    layer: int,
    partials: Partials,
    scale: float,
    softcap: float,
    stages: int,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    ring: Ring | None = None,
    packed: PackedStores | None = None,
    centres: torch.Tensor | None = None,
) -> None:
    """Compute attention of one query token per request, in one layer.

    Args:
        query: [T, H * G, D], dimensions contiguous; of any type with an FP8 cache.
        cache: [num_blocks, H, block_size, 2 * D] contiguous: layout LBHNC, keys then values. Its
            type is that of the queries, or float8_e4m3fn.
        out: [T, H * G, D] of any float type, dimensions contiguous; written at the tokens of the
            plan.
        stores: [rows, S] int32 store blocks.
        block_table: [batch, W] int32 positional blocks.
        slices: The plan of all layers (:func:`.slices.plan_slices`). The launch has its programs:
            as many as the GPU runs at once (:mod:`.residency`).
        layer: Index of the layer in the plan.
        partials: Scratch buffers, which no other launch may use at the same time.
        scale: Factor of query-key products, scales of an FP8 cache's keys and queries included.
        softcap: Logit soft cap, 0 for none.
        stages: The kernel's ``num_stages``.
        value_scale: Scale of an FP8 cache's values.
        sinks: [H * G] float32 attention sinks, contiguous; None for none.
        ring: Ring entries to which the queries are written as well; None for none.
        packed: The stores, if they are in few bits; the cache is then not FP8.
        centres: [H, D] float32, without which their keys are stored, contiguous.

    Raises:
        ValueError: The cache is not contiguous, its type is not the query's, shapes differ, or
            stores in few bits lie in an FP8 cache or have no centres.

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
    if quantised and packed is not None:
        raise ValueError("stores in few bits are not read from an FP8 cache")
    if packed is not None and (centres is None or tuple(centres.shape) != (heads, dim)):
        raise ValueError(f"stores in few bits need centres of {heads} heads of {dim} dimensions")
    if query_heads % heads or query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"{query_heads} query heads do not fit {heads} KV heads, or are strided")
    sums, group = partials.sums, query_heads // heads
    if tuple(sums.shape) != (2 * slices.programs, group, dim) or not sums.is_contiguous():
        raise ValueError(
            f"scratch {tuple(sums.shape)} does not fit queries of {tuple(query.shape)} and "
            f"{slices.programs} programs"
        )
    dim_pad = max(16, triton.next_power_of_2(dim))
    rows_merged = triton.next_power_of_2(group)
    unused = partials.arrived
    constants = NOT_PACKED if packed is None else packed.constants(dim)
    _attend_kernel[(slices.programs,)](
        query,
        cache,
        out,
        sums,
        partials.weights,
        partials.arrived,
        slices.pieces[layer],
        stores,
        block_table,
        partials.weights if sinks is None else sinks,
        out if ring is None else ring.entries,
        unused if ring is None else ring.slots,
        unused if ring is None else ring.seq_lens,
        unused if packed is None else cache.view(torch.int32),
        unused if packed is None else packed.rotation,
        partials.weights if centres is None else centres,
        ones(query.dtype),
        scale,
        softcap or 1.0,
        value_scale,
        1.0 if packed is None else packed.scale,
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
        WORDS=WORDS,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        RECORD=ring is not None,
        LOG2E=_LOG2E,
        FP8=quantised,
        STORE_BYTES=cache[0, 0].nbytes,
        **constants,
        num_warps=4,
        num_stages=stages,
    )
