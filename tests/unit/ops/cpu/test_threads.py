"""Work of several layers at once."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_kvevict.ops.cpu import threads

TIMEOUT_S = 10


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_results_are_in_order_and_of_several_threads():
    """None of three comes back before all have begun."""
    met = threading.Barrier(3)

    def work(number):
        if number < 3:
            met.wait(TIMEOUT_S)
        return number, threading.get_ident()

    found = threads.each(work, range(20))
    assert [number for number, _ in found] == list(range(20))
    assert len({thread for _, thread in found}) == 3


@pytest.mark.parametrize("bad", range(3))
def test_an_error_is_told_when_all_have_ended(bad):
    met, ended = threading.Barrier(3), []

    def work(number):
        met.wait(TIMEOUT_S)
        if number == bad:
            raise ValueError("this one")
        ended.append(number)

    with pytest.raises(ValueError, match="this one"):
        threads.each(work, range(3))
    assert sorted(ended) == [number for number in range(3) if number != bad]


@pytest.mark.parametrize("inference", [True, False])
def test_threads_are_in_the_mode_of_who_asks(inference):
    met = threading.Barrier(3)

    def work(_):
        met.wait(TIMEOUT_S)
        return torch.is_inference_mode_enabled()

    with torch.inference_mode(inference):
        assert threads.each(work, range(3)) == [inference] * 3


def test_threads_may_run_wherever_one_of_the_process_may():
    """OpenMP binds the thread that asks to one core; others have the rest."""
    everywhere, found = os.sched_getaffinity(0), []
    if len(everywhere) < 2:
        pytest.skip("one core")
    threads._pool.cache_clear()
    ready, done = threading.Event(), threading.Event()

    def bound():
        os.sched_setaffinity(0, {min(everywhere)})
        ready.set()
        met = threading.Barrier(3)

        def work(_):
            met.wait(TIMEOUT_S)
            return threading.get_ident(), os.sched_getaffinity(0)

        found.extend(threads.each(work, range(3)))
        done.set()

    asking = threading.Thread(target=bound)
    asking.start()
    asking.join(TIMEOUT_S)
    assert done.is_set()
    mine = dict(found).pop(asking.ident)
    assert mine == {min(everywhere)}
    assert all(cores == everywhere for thread, cores in found if thread != asking.ident)


def test_a_child_of_a_fork_has_threads_of_its_own():
    met = threading.Barrier(3)
    threads.each(lambda _: met.wait(TIMEOUT_S), range(3))
    pool = threads._pool(2)
    assert isinstance(pool, ThreadPoolExecutor) and threads._pool(2) is pool
    child = os.fork()
    if not child:
        os._exit(0 if threads._pool(2) is not pool else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
