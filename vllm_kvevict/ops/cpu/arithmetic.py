"""Functions of single numbers that compiled loops apply to many at once: without branches, tables
and calls, so that LLVM runs them on vectors."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from vllm_kvevict.ops.cpu.compiled import load_numba

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Freedom of compiled loops: any order of sums, fused products. NaN and infinity count."""

PART = {"fastmath": FAST, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled functions call: half of the time to compile is saved."""

TERMS = (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 0.24022648, 0.69314721, 1.0)
"""Polynomial of 2**x for x in [-0.5, 0.5], the highest power first, within 2e-7."""


class Arithmetic(NamedTuple):
    """Compiled functions.

    Args:
        as_float: int32 -> float32 of the same bits.
        as_int: float32 -> int32 of the same bits.
        power: float32, at most 0 -> 2**x within 3e-7 of it; NaN for NaN.
        half: Bits of a float16 as an integer -> float32.

    """

    as_float: Any
    as_int: Any
    power: Any
    half: Any


@lru_cache
def arithmetic() -> Arithmetic:
    """Return the compiled functions."""
    numba = load_numba()
    from numba.core import types
    from numba.extending import intrinsic

    def bits(source: Any, target: Any) -> Any:
        def cast(typing: Any, number: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                return builder.bitcast(values[0], context.get_value_type(target))

            return target(source), generate

        return intrinsic(cast)

    as_float, as_int = bits(types.int32, types.float32), bits(types.float32, types.int32)
    single, integer = np.float32, np.int32
    a, b, c, d, e, f, g = (single(term) for term in TERMS)

    @numba.njit(**PART)
    def power(x: Any) -> Any:
        bounded = max(x, single(-126.0))
        whole = integer(bounded - single(0.5))
        rest = bounded - single(whole)
        found = (((((a * rest + b) * rest + c) * rest + d) * rest + e) * rest + f) * rest + g
        found *= as_float(integer((whole + integer(127)) << integer(23)))
        return found if x == x else x

    @numba.njit(**PART)
    def half(number: Any) -> Any:
        number = integer(number)
        exponent, shifted = number & integer(0x7C00), (number & integer(0x7FFF)) << integer(13)
        # Without a subnormal number in float32, which processors may compute slowly.
        normal = shifted + integer(112 << 23)
        small = as_int(as_float(integer(shifted + integer(113 << 23))) - single(2.0**-14))
        found = normal if exponent else small
        found = shifted | integer(0x7F800000) if exponent == integer(0x7C00) else found
        return as_float(integer(found | ((number & integer(0x8000)) << integer(16))))

    return Arithmetic(as_float, as_int, power, half)
