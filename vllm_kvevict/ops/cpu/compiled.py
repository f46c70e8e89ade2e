"""Loops compiled by numba, which vLLM requires, on the threads that torch has."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any


def load_numba() -> Any:
    """Import numba, in a way that a second engine of the process can start.

    vLLM looks through the ``__dict__`` of everything that a module names when an engine starts, and
    llvmlite's library returns a function for that name.
    """
    import numba
    from llvmlite.binding import ffi

    ffi.lib._fntab.setdefault("__dict__", {})
    return numba


@lru_cache
def _pool(threads: int, cores: frozenset[int]) -> ThreadPoolExecutor:
    """Threads on all cores of the process. vLLM binds the thread that starts them to one core."""
    return ThreadPoolExecutor(
        threads, "kv-eviction-compiled", lambda: os.sched_setaffinity(0, cores)
    )


def run(kernel: Callable[..., None], count: int, *arrays: Any, threads: int) -> None:
    """Run a compiled loop over ``count`` indices, divided between threads.

    Args:
        kernel: The loop, compiled with ``nogil``. Its last two arguments are the first index of a
            call and the index after its last.
        count: Number of indices.
        arrays: The arguments before these two.
        threads: Maximum number of threads.

    """
    threads = min(threads, count)
    if threads < 2:
        kernel(*arrays, 0, count)
        return
    ends = [count * i // threads for i in range(threads + 1)]
    pool = _pool(threads - 1, CORES)
    others = [pool.submit(kernel, *arrays, *ends[i : i + 2]) for i in range(1, threads)]
    kernel(*arrays, *ends[:2])
    for other in others:
        other.result()


CORES = frozenset(os.sched_getaffinity(0))
"""The cores of the process when it started, before vLLM binds its threads."""
