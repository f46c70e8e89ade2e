"""Compiled work on as many threads as PyTorch computes with.

Numba's OpenMP is PyTorch's where vLLM starts a process, so its threads are those that vLLM has
bound to cores; threads of another kind would wait for cores on which these still spin.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numba
import torch


def share(
    together: Callable[..., None], alone: Callable[..., None], pieces: int, *args: Any
) -> None:
    """Do pieces 0 to ``pieces`` of some work, in parts of equal length, on all threads.

    Args:
        together: Calls ``alone`` for each of ``parts``, as ``together(parts, pieces, *args)``.
        alone: Does some of the pieces, as ``alone(first, end, *args)``.
        pieces: Of the work; they may be done in any order.
        args: What both take.

    """
    parts = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, pieces)
    if parts < 2 or _launched() != os.getpid():
        alone(0, pieces, *args)
        return
    numba.set_num_threads(parts)
    together(parts, pieces, *args)


@cache
def _launched() -> int | None:
    """The process that Numba's threads are of; None where they are not OpenMP's.

    A process that is forked from it would be ended by Numba if it used them.
    """
    # Who launches them gets as many threads for PyTorch as Numba has, and vLLM has chosen that
    # number; so a thread does it that has no other work.
    layers: list[str] = []
    launcher = threading.Thread(target=_launch, args=(layers,))
    launcher.start()
    launcher.join()
    return os.getpid() if layers == ["omp"] else None


def _launch(layers: list[str]) -> None:
    # Numba raises it where NUMBA_THREADING_LAYER names what is not installed.
    with suppress(ValueError):
        numba.set_num_threads(1)
        layers.append(numba.threading_layer())
