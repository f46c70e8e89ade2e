"""Draws: seeds that tell neighbours apart, noise that is Gumbel's, top-k that samples."""

import math
import subprocess
import sys
from collections import Counter
from itertools import permutations

import pytest
import torch

from vllm_kvevict.ops.torch.sample import digest, gumbel


def test_digests_depend_on_every_number_and_their_order():
    seeds = {digest(p) for p in permutations((-(2**63), 0, 1, 2**63 - 1))}
    seeds |= {digest((0, 0, 0, n)) for n in range(100)} | {digest(()), digest((0,)), digest((0, 0))}
    assert len(seeds) == 24 + 103
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_number_out_of_range_is_an_error():
    with pytest.raises(OverflowError):
        digest((2**63,))


def test_noise_repeats_in_another_process():
    code = (
        "from vllm_kvevict.ops.torch.sample import digest, gumbel;"
        "print(gumbel(digest((3, -4)), 5).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(gumbel(digest((3, -4)), 5).tolist())


def test_noise_has_the_distribution_of_gumbel():
    noise = gumbel(1, 1_000_000)
    assert noise.isfinite().all() and noise.abs().max() < 40
    for x in (-1.5, -0.5, 0.0, 1.0, 3.0):
        expected = math.exp(-math.exp(-x))
        assert abs(float((noise <= x).double().mean()) - expected) < 0.002


def test_the_highest_are_draws_without_replacement():
    """Every ordered pair of four comes as often as drawing one after another makes it."""
    logits = torch.tensor([1.5, 0.0, 0.7, -1.0], dtype=torch.float64)
    weights = logits.exp().tolist()
    rounds = 40_000
    noise = gumbel(7, 4 * rounds).view(rounds, 4)
    pairs = (logits + noise).topk(2).indices.tolist()
    counts = Counter(map(tuple, pairs))
    for first, second in permutations(range(4), 2):
        left = sum(weights) - weights[first]
        chance = weights[first] / sum(weights) * weights[second] / left
        spread = math.sqrt(rounds * chance * (1 - chance))
        assert abs(counts[first, second] - rounds * chance) < 4 * spread
