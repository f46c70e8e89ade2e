"""Functions of single numbers, against numpy's."""

import numpy as np

from vllm_kvevict.ops.cpu.arithmetic import FAST, arithmetic
from vllm_kvevict.ops.cpu.compiled import load_numba


def applied(function, numbers):
    @load_numba().njit(fastmath=FAST)
    def all_of(numbers, found):
        for index in range(len(numbers)):
            found[index] = function(numbers[index])

    found = np.empty(len(numbers), np.float32)
    all_of(numbers, found)
    return found


def test_powers_of_two():
    exponents = -np.logspace(-8, 2.1, 10_001, dtype=np.float32)
    found, expected = applied(arithmetic().power, exponents), np.exp2(exponents.astype(float))
    assert np.abs(found / expected - 1).max() < 3e-7
    special = np.array([0.0, -1000.0, -1e30, -np.inf, np.nan], np.float32)
    found = applied(arithmetic().power, special)
    assert found[0] == 1.0 and np.all(found[1:4] < 1e-37) and np.isnan(found[4])


def test_every_float16():
    """Subnormal numbers, infinity and NaN included."""
    patterns = np.arange(2**16).astype(np.uint16)
    expected = patterns.view(np.float16).astype(np.float32)
    assert np.array_equal(applied(arithmetic().half, patterns), expected, equal_nan=True)
