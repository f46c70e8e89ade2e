"""How many programs of the decode kernel a multiprocessor holds, and how far each reads ahead.

A program more than fits would start when others end, and a launch would take twice as long.
Numbers are those of the compiler, with Triton 3.7: a test compiles the kernel and compares.
"""

from triton import next_power_of_2

from vllm_kvevict.ops.triton.splits import TILE

RESERVED = 1024
"""Bytes of shared memory that CUDA takes for each block."""

AHEAD, AT_ONCE = 5, {128: 3, 256: 3, 512: 2}
"""``num_stages`` for two tiles of keys and values in flight; for one, by bytes of a row."""


def resident(head_size: int, itemsize: int, fp8: bool, shared_bytes: int) -> tuple[int, int]:
    """Programs of 128 threads on a multiprocessor, and the kernel's ``num_stages``.

    Args:
        head_size: D.
        itemsize: Of the queries, in bytes.
        fp8: Whether the cache is FP8.
        shared_bytes: Shared memory of a multiprocessor.

    """
    row = max(16, next_power_of_2(head_size)) * itemsize
    # Registers: up to 128, 168 and 208 a thread. FP8 is widened in registers.
    programs = 4 if row <= 128 else 3 if row <= 256 and not fp8 else 2
    tile = 2 * TILE * row // (itemsize if fp8 else 1)
    beside = 3072 + 16 * row + RESERVED
    if programs * (2 * tile + beside) <= shared_bytes:
        return programs, AHEAD
    fitting = shared_bytes // (tile + beside)
    return max(1, min(programs, fitting)), AT_ONCE.get(max(row, 128), 1)
