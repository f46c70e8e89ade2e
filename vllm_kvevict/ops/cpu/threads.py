"""Compiled operations on several layers or heads at once: they hold no lock of the interpreter."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from itertools import count
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[work(item) for item in items]`` on as many threads as PyTorch has.

    Args:
        work: Spends its time in compiled functions, and writes what no other item reads or writes.
            PyTorch's own operations would start threads of their own in each of these.
        items: Layers, or heads.

    """
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return [work(item) for item in items]
    found: list[Result | None] = [None] * len(items)
    numbers, inference = count(), torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference):
            while (number := next(numbers)) < len(items):
                found[number] = work(items[number])

    helping = [_pool(torch.get_num_threads() - 1).submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:
        for one in helping:
            # One that has not begun finds nothing to do.
            if not one.cancel():
                one.result()
    return found  # type: ignore[return-value]


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that run where those of this process may: OpenMP binds its first, which asks here."""
    cores: set[int] = set()
    if hasattr(os, "sched_getaffinity"):
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                cores |= os.sched_getaffinity(int(thread))
    bind = partial(os.sched_setaffinity, 0, cores) if cores else None
    return ThreadPoolExecutor(threads, "kv-eviction", bind)


# A child of a fork has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
