"""Number of programs of the decode kernel on a multiprocessor, and stages of their pipeline.

A program that does not fit would start only after others end, and the launch would take twice as
long. A test compiles the kernel with Triton 3.7 and checks that the programs fit. For a row of 256
bytes three programs would fit, but two were faster on an H100 (0.1 to 0.2 of its bandwidth).

A longer pipeline costs time at the beginning of each piece. On an H100 three stages were faster
than five for 128 sequences (41.4 and 44.6 microseconds), and slower for 512 and 2,048.
"""

from dataclasses import dataclass

from triton import next_power_of_2

from vllm_kvevict.ops.triton.slices import TILE

RESERVED = 1024
"""Bytes of shared memory that CUDA reserves for each thread block."""

AHEAD, AT_ONCE = 5, {128: 3, 256: 3, 512: 2}
"""``num_stages`` for two tiles of keys and values in flight, and for one tile by bytes of a row."""


@dataclass(frozen=True)
class Residency:
    """Programs of 128 threads on a multiprocessor, and the kernel's ``num_stages``.

    Args:
        programs: Programs of a multiprocessor.
        few: ``num_stages`` if there are no more sequences than programs of the GPU.
        many: ``num_stages`` if there are more.

    """

    programs: int
    few: int
    many: int


def resident(
    head_size: int, itemsize: int, fp8: bool, shared_bytes: int, packed: bool = False
) -> Residency:
    """Return the programs of a multiprocessor that run at once, and their stages.

    Args:
        head_size: D.
        itemsize: Bytes of an element of the queries.
        fp8: True if the cache is FP8.
        shared_bytes: Bytes of shared memory of a multiprocessor.
        packed: True if stores have few bits.

    """
    row = max(16, next_power_of_2(head_size)) * itemsize
    # Up to 128, 168 and 208 registers per thread; over stores in few bits up to 255.
    programs = 4 if row <= 128 and not packed else 2
    tile = 2 * TILE * row // (itemsize if fp8 else 1)
    other = 3072 + 16 * row + RESERVED
    few = AT_ONCE.get(max(row, 128), 1)
    if programs * (2 * tile + other) <= shared_bytes:
        return Residency(programs, few, AHEAD)
    fitting = shared_bytes // (tile + other)
    return Residency(max(1, min(programs, fitting)), few, few)
