"""Levels of stores in few bits on a CPU, compiled.

:func:`vllm_kvevict.ops.token_format.quantise` is their reference.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.arithmetic import FAST
from vllm_kvevict.ops.cpu.compiled import load_numba, run

ALONE = 2**14
"""Elements for which a second thread takes longer to start than it saves."""


@lru_cache
def _levels_kernel(width: int, bits: int) -> Callable[..., None]:
    """Return the compiled choice of levels for groups of ``width`` elements.

    The kernel's arguments, for N groups: ``elements`` [N, width] float32, ``scales`` [N, C] float32
    to choose from, ``levels`` [N, width] uint8 and ``chosen`` [N] int64, written, and the thread of
    this call and the number of threads.
    """
    numba, middle = load_numba(), np.float32((2**bits - 1) / 2)

    @numba.njit(nogil=True, fastmath=FAST - {"arcp"}, boundscheck=False)
    def kernel(
        elements: Any, scales: Any, levels: Any, chosen: Any, thread: int, threads: int
    ) -> None:
        count = len(elements)
        for row in range(count * thread // threads, count * (thread + 1) // threads):
            least, best = np.float32(0.0), 0
            for choice in range(scales.shape[1]):
                scale, error = scales[row, choice], np.float32(0.0)
                for d in range(width):
                    level = np.rint(elements[row, d] / scale + middle)
                    level = min(max(level, np.float32(0.0)), middle + middle)
                    off = (level - middle) * scale - elements[row, d]
                    error += off * off
                if choice == 0 or error < least:
                    least, best = error, choice
            chosen[row] = best
            scale = scales[row, best]
            for d in range(width):
                level = np.rint(elements[row, d] / scale + middle)
                levels[row, d] = np.uint8(min(max(level, np.float32(0.0)), middle + middle))

    return kernel


def quantise(
    elements: torch.Tensor, scales: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose for each group the scale with the least squared error.

    Args:
        elements: [N, D] float32, finite.
        scales: [N, C] float32, above 0, the first one for equal errors.
        bits: Bits of a level.

    Returns:
        Levels [N, D] uint8 and the chosen scales [N].

    """
    levels = torch.empty(elements.shape, dtype=torch.uint8)
    chosen = torch.empty(len(elements), dtype=torch.int64)
    arrays = [one.contiguous().numpy() for one in (elements, scales)]
    kernel = _levels_kernel(elements.shape[1], bits)
    threads = 1 if elements.numel() < ALONE else torch.get_num_threads()
    run(kernel, *arrays, levels.numpy(), chosen.numpy(), threads=threads)
    return levels, scales.gather(1, chosen[:, None])[:, 0]
