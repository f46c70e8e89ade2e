"""Simulated schedules of decode attention."""

from argparse import Namespace

import pytest

from benchmarks.gpu import balance
from vllm_kvevict.attention.scratch import splits_per_program

COSTS = balance.Costs(token=1, partial=0)


def test_schedules_of_splits():
    # 1088 keys at 4 splits: 272 each, and a sixteenth, in whole pages.
    sequences = balance.cut([588, 100, 400, 0], 4)
    assert sequences == [[(288, 3), (288, 3), (12, 3)], [(100, 1)], [(288, 2), (112, 2)], [(0, 1)]]
    assert [keys for keys, _ in balance.queue(sequences)] == [288, 288, 288, 112, 100, 12, 0]
    splits = [(keys, 1) for keys in (4, 1, 1, 4, 1, 1)]
    assert balance.dealt(splits, 3, COSTS) == [[4, 4], [1, 1], [1, 1]]
    assert balance.taken(splits, 3, COSTS) == [[4], [1, 4], [1, 1, 1]]
    longest_first = balance.taken(sorted(splits)[::-1], 3, COSTS)
    assert longest_first == [[4], [4], [1, 1, 1, 1]]
    assert balance.balance(longest_first, 12) == 1
    # Partial sums of sequences with several splits.
    assert balance.num_bytes((10, 2), balance.Costs(3, 5)) == 35
    assert balance.by_tenths([[10], [5]], 2) == [1.0] * 5 + [0.0] * 5


SHAPE = Namespace(heads=8, budget=1024, block_size=16, tail=96)
PROGRAMS = 2 * 132
OF_A_LLAMA = balance.Costs.of(group=4, head_size=128, itemsize=2)


def reached(found, costs=OF_A_LLAMA):
    """The balance of the schedule that the backend chooses on an H100."""
    sequences = balance.cut(found, PROGRAMS * splits_per_program(len(found), PROGRAMS))
    mine = balance.taken(balance.queue(sequences), PROGRAMS, costs)
    return balance.balance(mine, sum(found) * costs.token)


@pytest.mark.parametrize("requests", [64, 128, 256, 512, 1024])
def test_the_longest_first_balance(requests):
    """Without partial sums; round robin for comparison."""
    found = balance.lengths(requests, 1.0, Namespace(**vars(SHAPE), seed=1))
    assert reached(found, balance.Costs(OF_A_LLAMA.token, 0)) >= 0.93
    sequences = balance.cut(found, PROGRAMS * splits_per_program(len(found), PROGRAMS))
    flat = [split for mine in sequences for split in mine]
    dealt = balance.dealt(flat, PROGRAMS, OF_A_LLAMA)
    assert balance.balance(dealt, sum(found) * OF_A_LLAMA.token) < 0.8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("requests", [8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024])
def test_the_balance_of_real_heads_and_of_less_equal_ones(requests, sigma, seed):
    """At least 0.9 with partial sums. Real heads have a sigma of 0.5."""
    found = balance.lengths(requests, sigma, Namespace(**vars(SHAPE), seed=seed))
    assert reached(found) >= 0.9


def test_a_split_that_costs_more_counts_as_time():
    # Two programs: 4 + 1 and 4 + 1 and 2 + 1.
    assert balance.slowdown([(4, 1), (4, 1), (2, 1)], 2, COSTS, 10, 1) == 1.6
