"""Compiled loops on torch's threads."""

import os

import numpy as np
import pytest
import torch

from vllm_kvevict.ops.cpu.compiled import load_numba, run

numba = load_numba()


@numba.njit
def note(seen, thread, threads):
    seen[thread] = threads


@numba.njit
def double(seen):
    seen *= 2


@numba.njit
def too_much(seen, thread, threads):
    if thread == threads - 1:
        raise ValueError


def test_each_thread_is_called_once_and_the_end_afterwards(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    seen = np.zeros(4, np.int64)
    run(note, seen, threads=8)
    assert seen.tolist() == [3, 3, 3, 0]
    run(note, seen, threads=2, after=double)
    assert seen.tolist() == [4, 4, 6, 0]


def test_a_failure_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(MemoryError):
        run(too_much, np.zeros(4, np.int64), threads=3)


def test_the_threads_are_those_of_torch():
    """They run where vLLM bound them, and there are no others to compete with."""
    ones = torch.ones(2**22)
    assert float(ones.add(1).sum()) == 2.0**23
    before = set(os.listdir("/proc/self/task"))
    seen = np.zeros(torch.get_num_threads(), np.int64)
    run(note, seen, threads=len(seen))
    assert seen.tolist() == [len(seen)] * len(seen)
    assert set(os.listdir("/proc/self/task")) == before
