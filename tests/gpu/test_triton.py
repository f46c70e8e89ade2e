"""Triton's kernels compiled, on the cases of the interpreter and in the types it cannot do."""

import pytest
import torch

from tests.triton_cases import (
    check_centers,
    check_decode,
    check_lengths_and_slices,
    check_observe,
    check_page_table,
    check_unpack,
)
from vllm_kvevict.ops.token_format import INT4, INT8

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_decode(dtype, softcap, dim):
    options = dict(requests=5, padding=2, longest_tail=300, store_blocks=8)
    check_decode("cuda", dtype, seed=dim, softcap=softcap, dim=dim, programs=7, **options)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="Triton reads float8_e4m3fn from compute capability 8.9 on",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_over_an_fp8_cache(dtype, dim):
    options = dict(requests=5, padding=2, longest_tail=300, store_blocks=8, fp8=True)
    check_decode("cuda", dtype, seed=dim, dim=dim, programs=7, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_decode_over_stores_in_few_bits(dtype, stored, dim):
    options = dict(requests=5, padding=2, longest_tail=300, store_blocks=8, stored=stored)
    check_decode("cuda", dtype, seed=dim, dim=dim, programs=7, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_unpacked_tokens_of_few_bits(dtype, stored, dim):
    options = dict(requests=5, padding=2, longest_tail=300, store_blocks=8)
    check_unpack("cuda", dtype, stored, seed=dim, dim=dim, **options)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_decode_over_pages_of_several_tiles(block_size):
    options = dict(requests=9, heads=8, block_size=block_size, stored=INT4, dim=64, layers=1)
    check_decode("cuda", torch.bfloat16, seed=2, programs=100, **options)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_decode_blocks_and_groups(block_size, group):
    options = dict(requests=40, heads=8, block_size=block_size, longest_tail=500, layers=1)
    check_decode("cuda", torch.float16, seed=group, group=group, programs=500, **options)


@pytest.mark.parametrize("seed", range(5))
def test_many_pieces_merged_at_once(seed):
    options = dict(requests=20, heads=8, longest_tail=2000, layers=4)
    check_decode("cuda", torch.float16, seed=seed, programs=396, smallest=16, **options)


@pytest.mark.parametrize("programs", [1, 100, 400])
def test_lengths_and_slices(programs):
    check_lengths_and_slices(
        "cuda", programs, 64, 96, seed=programs, requests=256, longest_tail=900
    )


@pytest.mark.parametrize("block_size", [16, 128])
def test_page_table(block_size):
    check_page_table("cuda", seed=4, block_size=block_size, heads=3, padding=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_observe(dtype):
    check_observe("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "columns"), [(80, 350), (128, 2000), (256, 129)])
def test_centers(dtype, dim, columns):
    check_centers("cuda", dtype, dim, columns)
