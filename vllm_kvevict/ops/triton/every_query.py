"""Attention of every query of a step, counted for each token or with weights of tokens. Triton.

Each (request, KV head) pair is a sequence of any number of query tokens over a table of its pages.
The logits of a step are computed twice for :func:`add_column_sums`: once for the log-sum-exp of
each query, and once for the sums of each cached token. One program owns each result, so no sum
depends on the order of programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2E = 1.4426950408889634

_LEAST = -1.0e30
"""Lower bound of the largest logit: a program may see only tokens of weight 0 at first."""

NO_STRIDES = ["table_row", "float_row", "float_token"]
NO_ALIGNMENT = ["starts", "lengths", "table", "float_table", "stored_pages"]


@dataclass(frozen=True)
class Sequences:
    """S sequences of one KV head each, in one layer.

    Args:
        queries: [Q, G, D] contiguous, ordered by sequence, in the type of computations.
        starts: [S + 1] int32: first query of each sequence.
        lengths: [S] int32 cached tokens, those of the queries included. Query i of q attends to the
            first ``length - q + i + 1``.
        pages: [P, block_size * 2 * D] contiguous pages of keys and values; FP8 is typed.
        table: [S, V] int32 pages of each sequence.
        float_table: [S, W] int32 pages of each sequence in the cache, of its store first. It equals
            ``table`` unless stores are unpacked.
        stored_pages: [S] int32 pages of each store.
        heads: H. Sequence s is of KV head ``s % H``.
        block_size: Tokens in a page.
        page_tokens: Tokens in a page of a store in the cache.
        max_queries: Upper bound of the queries of a sequence.
        longest: Upper bound of ``lengths``.
        scale: Softmax scale, with the scales of an FP8 cache's keys and queries.
        softcap: Logit soft cap, 0 for none.
        sinks: [H, G] float32 contiguous attention sinks; None for none.

    """

    queries: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    float_table: torch.Tensor
    stored_pages: torch.Tensor
    heads: int
    block_size: int
    page_tokens: int
    max_queries: int
    longest: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.lengths)


@triton.jit
def _queries_of(
    query, start, rows, exists, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr
):  # fmt: skip
    """Return [ROWS, DIM_PAD] queries. Row r is of query ``r // GROUP`` and head ``r % GROUP``."""
    dim = tl.arange(0, DIM_PAD)
    at = (start.to(tl.int64) * GROUP + rows)[:, None] * DIM + dim[None, :]
    return tl.load(query + at, mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _tile_of(
    pages, own_table, key, used, dtype, PAGE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return [TILE, DIM_PAD] keys (PART 0) or values (PART 1) of cached tokens."""
    dim = tl.arange(0, DIM_PAD)
    page = tl.load(own_table + key // PAGE, mask=used, other=0).to(tl.int64)
    at = page * (PAGE * 2 * DIM) + (key % PAGE) * (2 * DIM) + PART * DIM
    read = used[:, None] & (dim < DIM)[None, :]
    return tl.load(pages + at[:, None] + dim[None, :], mask=read, other=0.0).to(dtype)


@triton.jit
def _logits(q, keys, scale, softcap, SOFTCAP: tl.constexpr, LOG2E: tl.constexpr):
    """Return [ROWS, TILE] logits in base 2."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh by the sigmoid, because Triton has no tanh.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * LOG2E


@triton.jit
def _float_at(own_table, stored, key, used, PAGE: tl.constexpr, STORED: tl.constexpr):
    """Return the index of a token's floats: of its page and slot in the cache."""
    in_store = key < stored * STORED
    new = key - stored * STORED
    column = tl.where(in_store, key // STORED, stored + new // PAGE)
    slot = tl.where(in_store, key % STORED, new % PAGE)
    page = tl.load(own_table + column, mask=used, other=0).to(tl.int64)
    return page * STORED + slot


@triton.jit(do_not_specialize=NO_STRIDES, do_not_specialize_on_alignment=NO_ALIGNMENT)
def _lse_kernel(
    query, pages, lse, starts, lengths, table, sinks, scale, softcap, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, LOG2E: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = rows < count * GROUP
    seen = length - count + rows // GROUP + 1
    last = tl.max(tl.where(exists, seen, 0), 0)
    q = _queries_of(query, start, rows, exists, GROUP, DIM, DIM_PAD)
    best = tl.full([ROWS], LEAST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if SINKS:
        own_head = (sequence % HEADS) * GROUP + rows % GROUP
        best = tl.load(sinks + own_head) * LOG2E
        weight += 1.0
    own_table = table + sequence.to(tl.int64) * table_row
    for base in range(0, last, TILE):
        key = base + tl.arange(0, TILE)
        used = key < length
        keys = _tile_of(pages, own_table, key, used, q.dtype, PAGE, DIM, DIM_PAD, 0)
        logits = _logits(q, keys, scale, softcap, SOFTCAP, LOG2E)
        logits = tl.where(key[None, :] < seen[:, None], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        weight = weight * tl.exp2(best - new_best) + tl.sum(tl.exp2(logits - new_best[:, None]), 1)
        best = new_best
    tl.store(lse + start.to(tl.int64) * GROUP + rows, best + tl.log2(weight), mask=exists)


@triton.jit(do_not_specialize=NO_STRIDES, do_not_specialize_on_alignment=NO_ALIGNMENT)
def _sums_kernel(
    query, pages, lse, floats, starts, lengths, table, float_table, stored_pages, scale, softcap,
    table_row, float_row, float_token,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    STORED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    base = tl.program_id(1) * TILE
    if base < length:
        key = base + tl.arange(0, TILE)
        used = key < length
        own_table = table + sequence.to(tl.int64) * table_row
        keys = _tile_of(pages, own_table, key, used, query.dtype.element_ty, PAGE, DIM, DIM_PAD, 0)
        sums = tl.zeros([TILE], tl.float32)
        # Queries before the first key of the tile do not attend to it.
        first = tl.maximum(0, base - length + count) * GROUP
        for begin in range(first // ROWS * ROWS, count * GROUP, ROWS):
            rows = begin + tl.arange(0, ROWS)
            exists = rows < count * GROUP
            seen = length - count + rows // GROUP + 1
            q = _queries_of(query, start, rows, exists, GROUP, DIM, DIM_PAD)
            whole = tl.load(lse + start.to(tl.int64) * GROUP + rows, mask=exists, other=0.0)
            logits = _logits(q, keys, scale, softcap, SOFTCAP, LOG2E)
            attends = exists[:, None] & (key[None, :] < seen[:, None])
            shares = tl.exp2(tl.where(attends, logits - whole[:, None], float("-inf")))
            sums += tl.sum(shares, 0)
        stored = tl.load(stored_pages + sequence)
        own_floats = float_table + sequence.to(tl.int64) * float_row
        at = floats + _float_at(own_floats, stored, key, used, PAGE, STORED) * float_token
        tl.store(at, tl.load(at, mask=used, other=0.0) + sums / GROUP, mask=used)


@triton.jit(do_not_specialize=NO_STRIDES, do_not_specialize_on_alignment=NO_ALIGNMENT)
def _weighted_kernel(
    query, pages, floats, out, starts, lengths, table, float_table, stored_pages, sinks, scale,
    softcap, value_scale, table_row, float_row, float_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LOG2E: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    stored = tl.load(stored_pages + sequence)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = rows < count * GROUP
    seen = length - count + rows // GROUP + 1
    last = tl.max(tl.where(exists, seen, 0), 0)
    q = _queries_of(query, start, rows, exists, GROUP, DIM, DIM_PAD)
    best = tl.full([ROWS], LEAST, tl.float32)
    below = tl.zeros([ROWS], tl.float32)
    if SINKS:
        own_head = (sequence % HEADS) * GROUP + rows % GROUP
        best = tl.load(sinks + own_head) * LOG2E
        below += 1.0
    above = tl.zeros([ROWS, DIM_PAD], tl.float32)
    own_table = table + sequence.to(tl.int64) * table_row
    own_floats = float_table + sequence.to(tl.int64) * float_row
    for base in range(0, last, TILE):
        key = base + tl.arange(0, TILE)
        used = key < length
        keys = _tile_of(pages, own_table, key, used, q.dtype, PAGE, DIM, DIM_PAD, 0)
        values = _tile_of(pages, own_table, key, used, q.dtype, PAGE, DIM, DIM_PAD, 1)
        weighs = used & (key < stored * STORED)
        at = floats + _float_at(own_floats, stored, key, used, PAGE, STORED) * float_token
        numerator = tl.load(at, mask=weighs, other=0.0) * LOG2E
        denominator = tl.load(at + 1, mask=weighs, other=0.0) * LOG2E
        logits = _logits(q, keys, scale, softcap, SOFTCAP, LOG2E)
        logits = tl.where(key[None, :] < seen[:, None], logits, float("-inf"))
        high = tl.max(logits + tl.maximum(numerator, denominator)[None, :], 1)
        new_best = tl.maximum(best, high)
        decay = tl.exp2(best - new_best)
        relative = logits - new_best[:, None]
        below = below * decay + tl.sum(tl.exp2(relative + denominator[None, :]), 1)
        shares = tl.exp2(relative + numerator[None, :]).to(values.dtype)
        above = above * decay[:, None] + tl.dot(shares, values, input_precision="ieee")
        best = new_best
    result = above * (value_scale / tl.where(below > 0, below, 1.0))[:, None]
    dim = tl.arange(0, DIM_PAD)
    at_out = (start.to(tl.int64) * GROUP + rows)[:, None] * DIM + dim[None, :]
    stores = exists[:, None] & (dim < DIM)[None, :]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=stores)


def add_column_sums(batch: Sequences, floats: torch.Tensor) -> None:
    """Add the softmax weights of a step's queries to a float of each cached token.

    H2O (arXiv:2306.14048) and NACL (arXiv:2408.03675), Algorithm 2: the column sums of
    ``exp(q K^T * scale - L)``, with L the log-sum-exp of a query's row, averaged over the query
    heads of a group. :func:`vllm_kvevict.ops.torch.column_sums.column_sums` defines the result.

    Args:
        batch: The sequences.
        floats: [num_pages, page_tokens, C] float32. The first float of each token that a query
            attends to is updated.

    """
    shape, sizes = _shape(batch), _tiles(batch)
    lse = torch.empty(batch.queries.shape[:2], dtype=torch.float32, device=floats.device)
    common = (batch.starts, batch.lengths, batch.table)
    scaled = (batch.scale, batch.softcap)
    _lse_kernel[(len(batch), triton.cdiv(batch.max_queries * shape["GROUP"], sizes["ROWS"]))](
        batch.queries,
        batch.pages,
        lse,
        *common,
        lse if batch.sinks is None else batch.sinks,
        *scaled,
        batch.table.stride(0),
        HEADS=batch.heads,
        SINKS=batch.sinks is not None,
        LEAST=_LEAST,
        **shape,
        **sizes,
    )
    _sums_kernel[(len(batch), triton.cdiv(batch.longest, sizes["TILE"]))](
        batch.queries,
        batch.pages,
        lse,
        floats,
        *common,
        batch.float_table,
        batch.stored_pages,
        *scaled,
        batch.table.stride(0),
        batch.float_table.stride(0),
        floats.stride(1),
        STORED=batch.page_tokens,
        **shape,
        **sizes,
    )


def weighted_attention(
    batch: Sequences, floats: torch.Tensor, out: torch.Tensor, value_scale: float = 1.0
) -> None:
    """Compute attention in which the log-weights of stored tokens are added to their logits.

    SubGen (arXiv:2402.06082), Algorithm 1, lines 29 to 31: ``sum exp(logit + a) v / (exp(sink) +
    sum exp(logit + b))``, with log-weights 0 after the store.

    Args:
        batch: The sequences.
        floats: [num_pages, page_tokens, C >= 2] float32 log-weights a and b of stored tokens.
        out: [Q, G, D] contiguous, written in place.
        value_scale: Factor from a stored value to the value.

    """
    shape, sizes = _shape(batch), _tiles(batch)
    _weighted_kernel[(len(batch), triton.cdiv(batch.max_queries * shape["GROUP"], sizes["ROWS"]))](
        batch.queries,
        batch.pages,
        floats,
        out,
        batch.starts,
        batch.lengths,
        batch.table,
        batch.float_table,
        batch.stored_pages,
        floats if batch.sinks is None else batch.sinks,
        batch.scale,
        batch.softcap,
        value_scale,
        batch.table.stride(0),
        batch.float_table.stride(0),
        floats.stride(1),
        HEADS=batch.heads,
        STORED=batch.page_tokens,
        SINKS=batch.sinks is not None,
        LEAST=_LEAST,
        **shape,
        **sizes,
    )


def _shape(batch: Sequences) -> dict[str, int | float | bool]:
    group, dim = batch.queries.shape[1:]
    return dict(
        GROUP=group,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        PAGE=batch.block_size,
        SOFTCAP=bool(batch.softcap),
        LOG2E=_LOG2E,
    )


def _tiles(batch: Sequences) -> dict[str, int]:
    """Return the query rows and the keys that a program multiplies at once.

    A decode step has one row for each query head. Large heads have small tiles, which fit the
    shared memory of a block.
    """
    group, dim = batch.queries.shape[1:]
    wide = dim > 128 or batch.queries.dtype == torch.float32
    few = batch.max_queries * group <= 16
    return dict(ROWS=16 if few else 32 if wide else 64, TILE=32 if wide else 64)
