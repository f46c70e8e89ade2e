"""Attention of one query token over a packed store. Triton.

Products are taken with the numbers of :func:`~.packed.levels`, for each group of dimensions and
its even and odd dimensions. The scales of keys multiply logits, and those of values multiply
weights before they are rounded to 16 bits. So no element of a key or value is rounded, where a
scaled element would be. What the products are too large by is subtracted first: the middle times
the sum of the rounded queries, and of the rounded weights as tensor cores add them, so that it is
exact but for sums in float32. It is small, because numbers are between 1 and 2, and the products
of a tile are summed before they are added to those of others.
"""

import triton
import triton.language as tl

from vllm_kvevict.ops.triton.packed import (
    appended,
    levels,
    load_columns,
    load_scales,
    load_words,
    middle,
    num_fields,
    rotation_rows,
    unit,
)
from vllm_kvevict.ops.triton.softmax import base_2


@triton.jit
def _rotate_query(
    q, signs, factor, START: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    SPREAD: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Return queries in the basis of stored tokens, and what is added to their products.

    Returns:
        By group, even and odd dimensions, and field: tiles [GROUP_PAD, SPREAD // 2] in the type of
        the query. And by group: [GROUP_PAD, 1] float32.

    """
    queries = ()
    starts = ()
    for group in tl.static_range(GROUPS):
        start = tl.zeros([q.shape[0]], tl.float32)
        for odd in tl.static_range(2):
            matrix = rotation_rows(signs, group, odd, q.dtype, SPREAD, DIM)
            rotated = tl.dot(q, tl.trans(matrix), input_precision="ieee") * factor
            for field in tl.static_range(num_fields(BITS, q.dtype)):
                # By a power of two, so that the queries of all fields are rounded alike.
                more = unit(START, BITS, field, q.dtype) / unit(START, BITS, 0, q.dtype)
                query = (rotated * more).to(q.dtype)
                queries = appended(queries, query)
                start -= tl.sum(query.to(tl.float32), 1) * middle(START, BITS, field, q.dtype)
        starts = appended(starts, start[:, None])
    return queries, starts


@triton.jit
def _rotate_sums_back(
    sums, weight, unit_of_sums, rotation, factor, TYPE: tl.constexpr, GROUPS: tl.constexpr,
    SPREAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Return weighted sums [GROUP_PAD, DIM_PAD] float32 of stored values in the model's basis.

    In 16 bits, three parts of each sum are multiplied by tensor cores. The products are exact,
    because the elements of the rotation are 1 and -1.

    Args:
        sums: By group, even and odd dimensions: [GROUP_PAD, SPREAD // 2] float32.
        weight: [GROUP_PAD] float32 sums of the weights, by which the largest part stays in range.
        unit_of_sums: Factor of the sums.
        rotation: See :class:`~.packed.PackedStores`.
        factor: The scale of the rotation.
        TYPE: Type of the products.

    """
    whole = tl.where(weight > 0, weight, 1.0)[:, None]
    back = tl.zeros([weight.shape[0], DIM_PAD], tl.float32)
    # The default of the cache, by name: the compiler merges equal loads, and what the query was
    # rotated by would be held in registers over the loop, more than there are.
    signs = load_columns(rotation, DIM, DIM_PAD, ".ca")
    for part in tl.static_range(2 * GROUPS):
        matrix = rotation_rows(signs, part // 2, part % 2, TYPE, SPREAD, DIM)
        mean = sums[part] * (unit_of_sums / whole)
        if tl.float32 == TYPE:
            back = tl.dot(mean, matrix, back, input_precision="ieee")
        else:
            high = mean.to(TYPE)
            rest = mean - high.to(tl.float32)
            second = rest.to(TYPE)
            low = (rest - second.to(tl.float32)).to(TYPE)
            back = tl.dot(low, matrix, back)
            back = tl.dot(second, matrix, back)
            back = tl.dot(high, matrix, back)
    return back * (whole * factor)


@triton.jit
def attend_stored(
    q, words, one, rotation, signs, rotation_scale, centre, own_stores, first_page, begin, end,
    best, weight, scale, softcap, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUPS: tl.constexpr, SPREAD: tl.constexpr,
    SOFTCAP: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Begin an online softmax with the keys ``begin`` to ``end`` of a packed store.

    A tile is a whole page or an equal part of one, so it has one address.

    Args:
        q: [GROUP_PAD, DIM_PAD].
        words: The cache as int32.
        one: See :func:`~.packed.levels`.
        rotation: See :class:`~.packed.PackedStores`.
        signs: [DIM_PAD] of :func:`~.packed.load_columns`.
        rotation_scale: The scale of the rotation.
        centre: [GROUP_PAD, DIM_PAD] float32, without which keys are stored, in each row.
        own_stores: Blocks of the request's store.
        first_page: Page of the store at which the head begins.
        begin: First key.
        end: End of the keys, larger than ``begin``.
        best: [GROUP_PAD] float32: a logit in base 2 before, of a sink.
        weight: [GROUP_PAD] float32: its weight.
        scale: Factor of the logits.
        softcap: Their cap.

    Returns:
        The largest logits, the sums of the weights, and the weighted sums [GROUP_PAD, DIM_PAD].

    """
    TYPE: tl.constexpr = q.dtype
    JOINT: tl.constexpr = KEY_BITS + VALUE_BITS <= 8
    START: tl.constexpr = VALUE_BITS if JOINT else 0
    KEY_FIELDS: tl.constexpr = num_fields(KEY_BITS, TYPE)
    VALUE_FIELDS: tl.constexpr = num_fields(VALUE_BITS, TYPE)
    VALUE_UNIT: tl.constexpr = unit(0, VALUE_BITS, 0, TYPE)
    PLANE: tl.constexpr = PAGE * DIM // 4
    SPAN: tl.constexpr = PAGE // TILES
    ROWS: tl.constexpr = q.shape[0]
    queries, starts = _rotate_query(q, signs, rotation_scale, START, KEY_BITS, GROUPS, SPREAD, DIM)
    factor = scale * unit(START, KEY_BITS, 0, TYPE)
    # The product with the centre is the same for all stored tokens.
    constant = tl.sum(q.to(tl.float32) * centre, 1) * scale
    if not SOFTCAP:
        factor = factor * LOG2E
        # Relative to it, so that no tile adds it.
        constant = constant * LOG2E
        best = best - constant
    sums = ()
    for _ in tl.static_range(2 * GROUPS):
        sums = appended(sums, tl.zeros([ROWS, SPREAD // 2], tl.float32))
    lane = tl.arange(0, LANES)
    # Added up after the loop.
    weights = tl.where((lane == 0)[None, :], weight[:, None], 0.0)
    for tile in range(begin // SPAN, (end + SPAN - 1) // SPAN):
        key = tile * SPAN + lane
        used = (lane < SPAN) & (key >= begin) & (key < end)
        flat = first_page + tile // TILES
        block = tl.load(own_stores + flat // HEADS)
        page = words + (block.to(tl.int64) * HEADS + flat % HEADS) * (BYTES // 4)
        scales = page + (PLANE if JOINT else 2 * PLANE)
        token = tile % TILES * SPAN + lane
        # All numbers of keys are made before the first product, so that few barriers are between
        # them. Those of values take the same shared memory.
        keys = ()
        codes = ()
        for group in tl.static_range(GROUPS):
            own_codes = load_words(page, token, used, group, SPREAD, DIM)
            for odd in tl.static_range(2):
                for field in tl.static_range(KEY_FIELDS):
                    keys = appended(keys, levels(own_codes, one, odd, START, KEY_BITS, field, TYPE))
            if not JOINT:
                own_codes = load_words(page + PLANE, token, used, group, SPREAD, DIM)
            codes = appended(codes, own_codes)
        logits = tl.zeros([ROWS, LANES], tl.float32)
        for group in tl.static_range(GROUPS):
            found = tl.zeros([ROWS, LANES], tl.float32) + starts[group]
            for part in tl.static_range(2 * group * KEY_FIELDS, 2 * (group + 1) * KEY_FIELDS):
                found = tl.dot(queries[part], tl.trans(keys[part]), found, input_precision="ieee")
            logits += found * load_scales(scales, token, used, group, GROUPS)[None, :]
        logits = logits * factor
        if SOFTCAP:
            logits = logits + constant[:, None]
        logits = base_2(logits, used, softcap, SOFTCAP, LOG2E)
        new_best = tl.maximum(best, tl.max(logits, 1))
        share = tl.exp2(logits - new_best[:, None])
        decay = tl.exp2(best - new_best)[:, None]
        best = new_best
        weights = weights * decay + share
        largest = 1.0
        if tl.float16 == TYPE:
            # The largest scale becomes 2^15, because float16 has no room for weights times small
            # scales.
            largest = load_scales(scales, token, used, GROUPS, GROUPS)
            for group in tl.static_range(1, GROUPS):
                other = load_scales(scales, token, used, GROUPS + group, GROUPS)
                largest = tl.maximum(largest, other)
            largest = tl.max(largest, 0) * 2.0**-15
        scaled = ()
        values = ()
        for group in tl.static_range(GROUPS):
            own_scales = load_scales(scales, token, used, GROUPS + group, GROUPS)
            if tl.float16 == TYPE:
                own_scales = own_scales * (1.0 / largest)
            for field in tl.static_range(VALUE_FIELDS):
                more = unit(0, VALUE_BITS, field, TYPE) / VALUE_UNIT
                scaled = appended(scaled, (share * (own_scales * more)[None, :]).to(TYPE))
            for odd in tl.static_range(2):
                for field in tl.static_range(VALUE_FIELDS):
                    numbers = levels(codes[group], one, odd, 0, VALUE_BITS, field, TYPE)
                    values = appended(values, numbers)
        new_sums = ()
        for group in tl.static_range(GROUPS):
            start = tl.zeros([ROWS, SPREAD // 2], tl.float32)
            for field in tl.static_range(VALUE_FIELDS):
                less = (tl.zeros([LANES, SPREAD // 2], tl.float32) - 1.0).to(TYPE)
                total = tl.dot(scaled[group * VALUE_FIELDS + field], less, input_precision="ieee")
                start += total * middle(0, VALUE_BITS, field, TYPE)
            for odd in tl.static_range(2):
                added = start
                for field in tl.static_range(VALUE_FIELDS):
                    added = tl.dot(
                        scaled[group * VALUE_FIELDS + field],
                        values[(2 * group + odd) * VALUE_FIELDS + field],
                        added,
                        input_precision="ieee",
                    )
                new_sums = appended(new_sums, sums[2 * group + odd] * decay + added * largest)
        sums = new_sums
    weight = tl.sum(weights, 1)
    back = _rotate_sums_back(
        sums, weight, VALUE_UNIT, rotation, rotation_scale, TYPE, GROUPS, SPREAD, DIM, DIM_PAD
    )
    if not SOFTCAP:
        best = best + constant
    return best, weight, back
