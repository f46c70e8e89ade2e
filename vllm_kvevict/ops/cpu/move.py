"""Copies of tokens between the pages of a CPU's cache, whatever the layout of a page."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import load_numba, run

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of as many bytes as an element: elements are copied as bits."""

ALONE = 2**17
"""Elements for which a second thread takes longer to start than it saves."""


class TokenMoves:
    """Copies tokens to pages, which they fill in order.

    All tokens are read before any is written, so targets may be among the sources.

    Args:
        offsets: [block_size, E] int64 offsets of each token's elements in a page, all different.

    """

    def __init__(self, offsets: torch.Tensor) -> None:
        order = offsets.flatten().argsort()
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order))
        self._sources = offsets.to(torch.int32).numpy().view(np.uint32)
        # Tokens are collected in the order in which a page holds them.
        self._targets = ranks.view_as(offsets).to(torch.int32).numpy().view(np.uint32)
        self._held = offsets.flatten()[order]

    def __call__(
        self,
        pages: torch.Tensor,
        source_page: torch.Tensor,
        source_slot: torch.Tensor,
        target_page: torch.Tensor,
    ) -> None:
        """Copy tokens, with the arguments of :meth:`PageLayout.copy`, of pages on the CPU."""
        held = pages.view(PATTERNS[pages.itemsize]).numpy()
        moved = np.empty((len(target_page), len(self._held)), held.dtype)
        run(
            _kernel(), held, source_page.contiguous().numpy(), source_slot.contiguous().numpy(),
            self._sources, self._targets, moved,
            threads=1 if moved.size < ALONE else torch.get_num_threads(),
        )  # fmt: skip
        target = target_page.numpy()
        if len(self._held) == held.shape[1]:
            held[target] = moved
        else:
            held[target[:, None], self._held.numpy()] = moved


@lru_cache
def _kernel() -> Callable[..., None]:
    """Return the compiled reading of the tokens of some target pages into ``moved``."""
    numba = load_numba()

    @numba.njit(nogil=True, boundscheck=False)
    def kernel(
        pages: Any, page: Any, slot: Any, sources: Any, targets: Any, moved: Any, thread: int,
        threads: int,
    ) -> None:  # fmt: skip
        count, (block_size, elements) = len(moved), sources.shape
        for target in range(count * thread // threads, count * (thread + 1) // threads):
            out = moved[target]
            for own_slot in range(block_size):
                token = target * block_size + own_slot
                found, held = pages[page[token]], slot[token]
                for element in range(elements):
                    out[targets[own_slot, element]] = found[sources[held, element]]

    return kernel
