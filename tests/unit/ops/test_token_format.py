"""Levels and scales of stores in few bits, against numpy's and by their definition."""

import pytest
import torch

from tests.oracles.packed import given_back
from vllm_kvevict.ops import token_format
from vllm_kvevict.ops.token_format import INT4, INT4_FP8, INT8, hadamard, quantise


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_a_rotation_preserves_products_and_spreads_an_element(size):
    matrix = hadamard(size, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-6)
    # A power of two is one block: a single large element becomes equally large ones.
    if size & (size - 1) == 0:
        assert torch.allclose(matrix[:, 5].abs(), torch.full((size,), size**-0.5))


@pytest.mark.parametrize("token_format", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_what_is_given_back_equals_numpys(token_format, size):
    torch.manual_seed(size)
    keys, values = torch.randn(2, 50, 3, size)
    keys[7] = 0.0
    keys[8, 1, 3] = 60.0
    planes = token_format.encode(keys, values)
    assert [plane.shape[-1] for plane in planes] == list(token_format.planes(size))
    found = token_format.decode(planes)
    bits = token_format.key_bits, token_format.value_bits
    for mine, original, count in zip(found, (keys, values), bits, strict=True):
        expected = given_back(original, count, values=original is values)
        step = original.abs().amax() * 2 / 2**count
        # Now and then an element falls on the other side of a step.
        same = torch.isclose(mine, expected, atol=1e-4).all(-1)
        assert same.float().mean() > 0.97 and (mine - expected).abs().max() < 2 * step
    assert float(found[0][7].abs().max()) < 1e-5


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compiled_levels_are_those_of_torch(monkeypatch, bits):
    """The reference is what GPUs run."""
    torch.manual_seed(bits)
    vectors = torch.randn(200, 128) * torch.rand(200, 1) * 10
    levels, scales = quantise(vectors, bits)

    class Elsewhere(torch.Tensor):
        is_cpu = False

    expected_levels, expected_scales = quantise(vectors.as_subclass(Elsewhere), bits)
    same = torch.eq(scales, expected_scales.as_subclass(torch.Tensor))
    assert same.float().mean() > 0.99, "only errors that are equal up to rounding choose otherwise"
    rows = same.all(-1)
    assert torch.equal(levels[rows], expected_levels.as_subclass(torch.Tensor)[rows])


def test_values_do_not_become_shorter():
    """Of a scale with the least squared error, three bits would take two to three percent."""
    torch.manual_seed(1)
    vectors = torch.randn(2000, 64)
    keys, values = INT4.decode(INT4.encode(vectors, vectors))
    along = [float((one * vectors).sum() / vectors.square().sum()) for one in (keys, values)]
    assert abs(along[1] - 1) < 2e-4
    # The least squared error leaves keys shorter by that error.
    lost = float((keys - vectors).square().sum() / vectors.square().sum())
    assert abs(1 - along[0] - lost) < 2e-4 and lost < 0.004


def test_the_name_tells_formats_apart():
    formats = token_format.AS_CACHED, INT4, INT4_FP8, INT8
    assert len({one.name for one in formats}) == len(formats)


def test_the_name_tells_signs_apart(monkeypatch):
    """Whatever the seed, another version of torch may draw others."""
    before = INT4.name
    drawn = token_format.signs
    monkeypatch.setattr(token_format, "signs", lambda size: drawn(size) * (1 - 2 * (size == 96)))
    assert INT4.name != before


@pytest.mark.parametrize("size", range(64, 264, 8))
def test_a_page_holds_its_tokens(size):
    """Of every head size from which stores in few bits are served, in the type of the cache."""
    for stored, itemsize in ((INT4, 2), (INT8, 2), (INT4_FP8, 1)):
        for block_size in (16, 32, 128):
            page = stored.page_bytes(block_size, 2 * size, itemsize)
            assert page == block_size * 2 * size * itemsize
