"""Simulated schedules of decode attention."""

from argparse import Namespace

import pytest

from benchmarks.gpu import balance
from vllm_kvevict.attention.scratch import splits_to_fill

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


@pytest.mark.parametrize("requests", [64, 128, 256, 512, 1024])
def test_the_longest_first_balance(requests):
    """What the decode kernel was built for: 95% of ideal on an H100, partial sums included."""
    args = Namespace(seed=1, heads=8, budget=1024, block_size=16, tail=96, sigma=1.0)
    found, programs = balance.lengths(requests, args.sigma, args), 2 * 132
    costs = balance.Costs.of(group=4, head_size=128, itemsize=2)
    sequences = balance.cut(found, splits_to_fill(len(found), programs))
    ideal = sum(found) * costs.token
    order = balance.queue(sequences)
    assert balance.balance(balance.taken(order, programs, costs), ideal) >= 0.94
    assert (
        balance.balance(balance.taken(order, programs, balance.Costs(costs.token, 0)), ideal)
        >= 0.95
    )
    flat = [split for mine in sequences for split in mine]
    assert balance.balance(balance.dealt(flat, programs, costs), ideal) < 0.8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("requests", [8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024])
def test_the_balance_of_real_heads(requests, seed):
    """Their shares differ less."""
    args = Namespace(seed=seed, heads=8, budget=1024, block_size=16, tail=96, sigma=0.5)
    found, programs = balance.lengths(requests, args.sigma, args), 2 * 132
    assert max(found) < max(balance.lengths(requests, 1.0, args))
    costs = balance.Costs.of(group=4, head_size=128, itemsize=2)
    order = balance.queue(balance.cut(found, splits_to_fill(len(found), programs)))
    reached = balance.balance(balance.taken(order, programs, costs), sum(found) * costs.token)
    assert reached >= 0.9


def test_a_split_that_costs_more_counts_as_time():
    # Two programs: 4 + 1 and 4 + 1 and 2 + 1.
    assert balance.slowdown([(4, 1), (4, 1), (2, 1)], 2, COSTS, 10, 1) == 1.6
