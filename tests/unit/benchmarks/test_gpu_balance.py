"""Simulated schedules of decode attention."""

from argparse import Namespace

import pytest

from benchmarks.gpu import balance

COSTS = balance.Costs(token=1, partial=0)


def test_schedules_of_splits():
    # 1000 keys at 4 splits: 250 each, in whole pages.
    sequences = balance.cut([500, 100, 400, 0], 4)
    assert sequences == [[(256, 2), (244, 2)], [(100, 1)], [(256, 2), (144, 2)], [(0, 1)]]
    assert [keys for keys, _ in balance.queue(sequences)] == [256, 256, 244, 144, 100, 0]
    splits = [(keys, 1) for keys in (4, 1, 1, 4, 1, 1)]
    assert balance.dealt(splits, 3, COSTS) == [[4, 4], [1, 1], [1, 1]]
    assert balance.taken(splits, 3, COSTS) == [[4], [1, 4], [1, 1, 1]]
    longest_first = balance.taken(sorted(splits)[::-1], 3, COSTS)
    assert longest_first == [[4], [4], [1, 1, 1, 1]]
    assert balance.balance(longest_first, 12) == 1
    # Partial sums of sequences with several splits.
    assert balance.num_bytes((10, 2), balance.Costs(3, 5)) == 35
    assert balance.by_tenths([[10], [5]], 2) == [1.0] * 5 + [0.0] * 5


def test_slices():
    # 48 + 48 + 64 keys and room of 16 before each: 208, 112 for each of two programs.
    found = balance.slices([48, 40, 64], 2, 16)
    assert found == [[(48, 1), (32, 2)], [(8, 2), (64, 1)]]
    # A slice that ends before the first key of a sequence has no piece of it.
    assert balance.slices([64, 48], 2, 64) == [[(64, 1)], [(48, 1)]]
    assert balance.slices([0, 0], 4, 0) == [[(0, 1), (0, 1)], [], [], []]
    assert balance.time([[4, 4], [5]], 13, 1) == round(10 * 2 / 13, 3)


def step(requests: int, sigma: float, seed: int) -> tuple[list[int], int, balance.Costs]:
    args = Namespace(seed=seed, heads=8, budget=1024, block_size=16, tail=96)
    found = balance.lengths(requests, sigma, args)
    return found, 2 * 132, balance.Costs.of(group=4, head_size=128, itemsize=2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("requests", [8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024])
def test_slices_take_about_the_time_of_a_queue(requests, sigma, seed):
    """If a piece costs as much with both; a queue's answer and its chain of loads cost more."""
    found, programs, costs = step(requests, sigma, seed)
    ideal = sum(found) * costs.token
    target = programs * 17 // 18 if len(found) <= programs else programs
    sequences = balance.cut(found, target)
    order = balance.queue(sequences)
    ours = [[balance.num_bytes(one, costs) for one in p] for p in balance.slices(found, programs)]
    late = 96 * costs.token
    queue = balance.queue_time(order, programs, costs, ideal, late)
    few = requests <= 24
    assert balance.time(ours, ideal, late) <= (1.1 if few else 1.03) * queue
    flat = [split for mine in sequences for split in mine]
    assert balance.dealt(flat, programs, costs)
    assert balance.balance(ours, ideal) >= (0.9 if requests >= 16 else 0.86)


def test_a_split_that_costs_more_counts_as_time():
    # Two programs: 4 + 1 and 4 + 1 and 2 + 1.
    assert balance.queue_time([(4, 1), (4, 1), (2, 1)], 2, COSTS, 10, 1) == 1.6
