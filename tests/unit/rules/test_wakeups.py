"""Who is looked at in which step, against requests that compute tokens one step after the other."""

import random
import weakref

import pytest

from vllm_kvevict.rules.wakeups import WakeupQueue


class Named:
    """A sleeper that can be referred to weakly."""


@pytest.mark.parametrize("most", [1, 4])
def test_nobody_is_overslept(most):
    rng = random.Random(most)
    queue, left = WakeupQueue(most), {}
    woken = 0
    for number in range(300):
        for name in queue.next_step():
            assert name in left
            if left[name] <= 0:
                del left[name]
                woken += 1
            else:
                queue.sleep(name, left[name])
        assert all(tokens > 0 for tokens in left.values()), "somebody was overslept"
        if number < 200:
            left[f"r{number}"] = rng.randrange(1, 60)
            queue.sleep(f"r{number}", left[f"r{number}"])
        for name in left:
            left[name] -= rng.randint(1, most)
    assert woken == 200 and not left


def test_at_one_token_a_step_a_sleeper_is_looked_at_once():
    queue = WakeupQueue()
    queue.sleep("a", 5)
    queue.sleep("b", 0)
    assert [queue.next_step() for _ in range(6)] == [["b"], [], [], [], ["a"], []]


def test_nobody_who_is_gone_is_kept():
    """A request may be due 100,000 steps later; what it holds must not stay as long."""
    queue: WakeupQueue[Named] = WakeupQueue()
    sleepers = [Named() for _ in range(3)]
    dead = [weakref.ref(one) for one in sleepers]
    for one in sleepers:
        queue.sleep(one, 5)
        queue.sleep(one, 100_000)
    for one in sleepers:
        queue.cancel(one)
        queue.cancel(one)
    del one
    sleepers.clear()
    assert [one() for one in dead] == [None] * 3
    assert not any(queue.next_step() for _ in range(6))


def test_a_sleeper_that_sleeps_anew_wakes_once():
    queue = WakeupQueue()
    queue.sleep("a", 2)
    queue.sleep("a", 4)
    assert [queue.next_step() for _ in range(5)] == [[], [], [], ["a"], []]
