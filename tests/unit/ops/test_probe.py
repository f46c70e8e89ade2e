"""Scores of keys against keys that are rotated and multiplied number by number."""

import cmath
import math

import pytest
import torch

from vllm_kvevict.ops.torch.probe import (
    Network,
    Rotation,
    key_scores,
    network_scores,
    probe_scores,
    unrotated,
    with_prose,
)


def rotated(key, angles, interleaved, stretch, first):
    """A key whose pairs are turned as complex numbers, and stretched."""
    found, pairs = list(key), len(angles)
    for i, angle in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        a, b = first + a, first + b
        turned = complex(key[a], key[b]) * cmath.rect(stretch, angle)
        found[a], found[b] = turned.real, turned.imag
    return found


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs, first", [(4, 0), (2, 0), (2, 4), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_keys_before_rotation(interleaved, pairs, first, dtype, by_dimension):
    """In memory, keys lie token by token, or dimension by dimension as CPU kernels store them."""
    generator = torch.Generator().manual_seed(0)
    heads, tokens, size, stretch = 2, 18, 8, 1.25
    keys = torch.randn(heads, tokens, size, generator=generator).double()
    angles = torch.rand(tokens, pairs, generator=generator).double() * 6
    weights = torch.randn(heads, 3, size + 2, generator=generator)
    turned = torch.tensor(
        [
            [
                rotated(keys[h, n].tolist(), angles[n].tolist(), interleaved, stretch, first)
                for n in range(tokens)
            ]
            for h in range(heads)
        ]
    ).to(dtype)
    if by_dimension:
        turned = turned.mT.contiguous().mT
    rotation = Rotation(
        (angles.cos() / stretch).float(), (angles.sin() / stretch).float(), interleaved, first
    )
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.1)
    torch.testing.assert_close(unrotated(turned, rotation).double(), keys, **tolerance)
    found = key_scores(turned, rotation, weights)
    assert found.dtype == torch.float32 and found.shape == (heads, tokens, 3)
    for h in range(heads):
        for n in range(tokens):
            key = keys[h, n].tolist()
            for c in range(3):
                *a, b, constant = weights[h, c].tolist()
                expected = math.fsum(x * y for x, y in zip(a, key, strict=True))
                expected += b * math.sqrt(math.fsum(x * x for x in key)) + constant
                assert float(found[h, n, c]) == pytest.approx(
                    expected, abs=1e-4 if dtype == torch.float32 else 0.3
                )


def test_keys_without_rotation_are_read_as_they_are():
    keys = torch.randn(1, 4, 4)
    weights = torch.tensor([[[1.0, 0, 0, 0, 0, 2.0]]])
    torch.testing.assert_close(key_scores(keys, None, weights)[0, :, 0], keys[0, :, 0] + 2)


def test_prose_adds_where_it_is_above_the_average():
    torch.manual_seed(0)
    keys, ages = torch.randn(2, 20, 6), torch.randn(20, 2)
    weights, of_ages = torch.randn(2, 4, 8), torch.randn(2, 2, 2)
    found = with_prose(key_scores(keys, None, weights), ages, of_ages)
    assert found.shape == (2, 20, 2)
    added = 0
    for h in range(2):
        for n in range(20):
            key = keys[h, n].tolist()
            features = [*key, math.hypot(*key), 1.0]
            said = [
                math.fsum(x * y for x, y in zip(weights[h, c].tolist(), features, strict=True))
                for c in range(4)
            ]
            for c in range(2):
                aged = math.fsum((of_ages[h, c] * ages[n]).tolist())
                more = max(0.0, said[2 + c] + aged)
                assert float(found[h, n, c]) == pytest.approx(said[c] + more, abs=1e-4)
                added += more > 0
    assert 10 < added < 70


@pytest.mark.parametrize("with_shares", [True, False])
def test_networks_are_their_units_one_by_one(with_shares):
    torch.manual_seed(0)
    heads, tokens, units, size = 2, 9, 3, 6
    keys, logs = torch.randn(heads, tokens, size), torch.randn(heads, tokens)
    hidden, out = torch.randn(heads, units, size + 3), torch.randn(heads, units + 1)
    shares = logs if with_shares else None
    found = network_scores(keys, Network.of(hidden, out), shares)
    assert found.shape == (heads, tokens)
    for h in range(heads):
        for n in range(tokens):
            key, log = keys[h, n].tolist(), float(logs[h, n]) if with_shares else 0.0
            features = [*key, math.hypot(*key), 1.0, log]
            expected = float(out[h, -1]) * log
            for u in range(units):
                z = math.fsum(x * y for x, y in zip(hidden[h, u].tolist(), features, strict=True))
                expected += float(out[h, u]) * z * (1 + math.erf(z / math.sqrt(2))) / 2
            assert float(found[h, n]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("with_shares", [True, False])
@pytest.mark.parametrize("ages", [True, False])
def test_scores_are_the_sum_of_probes_prose_and_network(by_dimension, with_shares, ages):
    """The same numbers, one by one, from keys that were rotated."""
    torch.manual_seed(0)
    heads, tokens, units, size, angles = 2, 9, 3, 6, torch.rand(9, 3) * 6
    keys, logs = torch.randn(heads, tokens, size), torch.randn(heads, tokens)
    turned = torch.tensor(
        [
            [rotated(keys[h, n].tolist(), angles[n].tolist(), False, 1.0, 0) for n in range(tokens)]
            for h in range(heads)
        ]
    )
    if by_dimension:
        turned = turned.mT.contiguous().mT
    hidden, out = torch.randn(heads, units, size + 3), torch.randn(heads, units + 1)
    weights = torch.randn(heads, 4, size + 2)
    logged, of_ages = torch.randn(tokens, 2), torch.randn(heads, 2, 2)
    found = probe_scores(
        turned,
        Rotation(angles.cos(), angles.sin()),
        weights,
        (logged, of_ages) if ages else None,
        Network.of(hidden, out),
        logs if with_shares else None,
    )
    assert found.shape == (heads, tokens, 2 if ages else 4) and found.dtype == torch.float32
    for h in range(heads):
        for n in range(tokens):
            key, log = keys[h, n].tolist(), float(logs[h, n]) if with_shares else 0.0
            features = [*key, math.hypot(*key), 1.0, log]

            def product(row, features=features):
                return math.fsum(x * y for x, y in zip(row.tolist(), features, strict=False))

            said = [product(row) for row in weights[h]]
            if ages:
                aged = [math.fsum((row * logged[n]).tolist()) for row in of_ages[h]]
                said = [said[c] + max(0.0, said[2 + c] + aged[c]) for c in range(2)]
            network = float(out[h, -1]) * log
            for u in range(units):
                z = product(hidden[h, u])
                network += float(out[h, u]) * z * (1 + math.erf(z / math.sqrt(2))) / 2
            expected = [one + network for one in said]
            assert found[h, n].tolist() == pytest.approx(expected, abs=1e-4)
