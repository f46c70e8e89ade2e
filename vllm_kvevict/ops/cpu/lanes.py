"""Products of a query with the keys of 16 tokens at once, which a page holds by dimension.

LLVM turns a short loop over 16 tokens into single operations before it looks for vectors, so the
vectors are written here.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from vllm_kvevict.ops.cpu.compiled import load_numba

LANES = 16
"""Tokens at once: one vector of AVX-512, two of AVX2."""


class Strides(NamedTuple):
    """Evenly spaced offsets of the keys or of the values in a page.

    Args:
        base: Offset of the first element.
        shape: Groups of tokens, tokens in a group, groups of dimensions, dimensions in a group.
        steps: Strides of these.

    """

    base: int
    shape: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]

    @property
    def by_dimension(self) -> bool:
        """True if elements of the same dimension, or pair of dimensions, of :data:`LANES` tokens
        follow one another."""
        pairs = self.shape[3] == 2 and self.steps[3] == 1 and self.steps[1] == 2
        return self.shape[1] % LANES == 0 and (self.steps[1] == 1 or pairs)


@lru_cache
def products(strides: Strides, dtype: torch.dtype) -> Any:
    """Return the intrinsic ``products(query, page, start, logits, at)``.

    It writes ``logits[at : at + LANES]``, from ``query`` [D] float32 and the keys of as many tokens
    of ``page``, the first at ``start``; both arrays are contiguous.

    Args:
        strides: Offsets of the keys, :attr:`Strides.by_dimension`.
        dtype: Type of the elements of ``page``. Other types than float32 are in integers of as many
            bits.

    """
    load_numba()
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    single, integer, word = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    narrow = ir.IntType(8 * dtype.itemsize)
    _, _, groups, per_group = strides.shape
    _, token_step, group_step, own_step = strides.steps

    def constant(number: int, count: int = LANES) -> Any:
        return ir.Constant(ir.VectorType(integer, count), [number] * count)

    def floats(builder: Any, bits: Any) -> Any:
        return builder.bitcast(bits, ir.VectorType(single, LANES))

    def widened(builder: Any, found: Any) -> Any:
        """Return elements as float32."""
        if dtype == torch.float32:
            return found
        if dtype == torch.float16:
            half = builder.bitcast(found, ir.VectorType(ir.HalfType(), LANES))
            return builder.fpext(half, ir.VectorType(single, LANES))
        bits = builder.zext(found, ir.VectorType(integer, LANES))
        if dtype == torch.bfloat16:
            return floats(builder, builder.shl(bits, constant(16)))
        # FP8 with 4 bits of exponent and 3 of mantissa, whose only special number is NaN.
        number = builder.and_(bits, constant(0x7F))
        shifted = builder.shl(number, constant(20))
        least = ir.Constant(ir.VectorType(single, LANES), [2.0**-6] * LANES)
        small = builder.fsub(floats(builder, builder.add(shifted, constant(121 << 23))), least)
        normal = floats(builder, builder.add(shifted, constant(120 << 23)))
        is_small = builder.icmp_unsigned("<", number, constant(8))
        is_nan = builder.icmp_unsigned("==", number, constant(0x7F))
        size = builder.select(is_nan, floats(builder, constant(0x7FC00000)), normal)
        size = builder.bitcast(builder.select(is_small, small, size), bits.type)
        sign = builder.shl(builder.and_(bits, constant(0x80)), constant(24))
        return floats(builder, builder.or_(size, sign))

    def multiply(typing: Any, query: Any, page: Any, start: Any, logits: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kinds = signature.args
            data = [
                context.make_array(kinds[place])(context, builder, values[place]).data
                for place in (0, 1, 3)
            ]
            held = narrow if dtype.itemsize < 4 else single
            total = cgutils.alloca_once_value(
                builder, ir.Constant(ir.VectorType(single, LANES), [0.0] * LANES)
            )
            builder.store(ir.Constant(ir.VectorType(single, LANES), [0.0] * LANES), total)

            def add(dim: Any, keys: Any) -> None:
                number = builder.load(builder.gep(data[0], [dim]))
                lanes = ir.Constant(ir.VectorType(single, LANES), ir.Undefined)
                lanes = builder.insert_element(lanes, number, ir.Constant(integer, 0))
                lanes = builder.shuffle_vector(lanes, lanes, constant(0))
                product = builder.fmul(lanes, widened(builder, keys), flags=("contract",))
                found = builder.fadd(builder.load(total), product, flags=("contract",))
                builder.store(found, total)

            def read(offset: Any, count: int) -> Any:
                place = builder.gep(data[1], [offset])
                kind = ir.VectorType(held, count).as_pointer()
                return builder.load(builder.bitcast(place, kind), align=dtype.itemsize)

            def picked(both: Any, first: int) -> Any:
                mask = ir.Constant(
                    ir.VectorType(integer, LANES), [2 * lane + first for lane in range(LANES)]
                )
                return builder.shuffle_vector(both, both, mask)

            with cgutils.for_range(builder, ir.Constant(word, groups)) as group:
                begin = builder.mul(group.index, ir.Constant(word, group_step))
                begin = builder.add(values[2], begin)
                dim = builder.mul(group.index, ir.Constant(word, per_group))
                if token_step == 2:
                    both = read(begin, 2 * LANES)
                    add(dim, picked(both, 0))
                    add(builder.add(dim, ir.Constant(word, 1)), picked(both, 1))
                else:
                    with cgutils.for_range(builder, ir.Constant(word, per_group)) as own:
                        offset = builder.mul(own.index, ir.Constant(word, own_step))
                        add(
                            builder.add(dim, own.index),
                            read(builder.add(begin, offset), LANES),
                        )
            into = builder.bitcast(builder.gep(data[2], [values[4]]), total.type)
            builder.store(builder.load(total), into, align=4)
            return context.get_dummy_value()

        return types.void(query, page, types.int64, logits, types.int64), generate

    return intrinsic(multiply)
