"""Triton kernels in Triton's interpreter, in float32 and float16 (its bfloat16 dot is wrong)."""

import pytest
import torch

from tests.interpreted.interleave import interleaved
from tests.nightly import covering
from tests.triton_cases import (
    check_centers,
    check_decode,
    check_lengths_and_slices,
    check_observe,
    check_page_table,
    check_recording_page_table,
    check_unpack,
)
from vllm_kvevict.ops.token_format import INT4, INT8, PackedFormat
from vllm_kvevict.ops.triton import page_table, slices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_types_and_softcap(dtype, softcap):
    check_decode("cpu", dtype, seed=1, softcap=softcap, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_over_an_fp8_cache(dtype, softcap):
    check_decode("cpu", dtype, seed=6, softcap=softcap, padding=1, fp8=True)


@pytest.mark.parametrize(
    ("stored", "dim", "programs"),
    covering(
        [
            pytest.param(INT4, 64, id="int4"),
            pytest.param(INT8, 128, id="int8"),
            pytest.param(PackedFormat(5, 3, 60), 256, id="5 and 3 bits"),
            pytest.param(INT4, 80, id="80 dimensions"),
        ],
        [1, 5, 24],
    ),
)
def test_decode_over_stores_in_few_bits(stored, dim, programs):
    # Pieces that end inside a page of a store, in the tail, and requests without a store.
    options = dict(stored=stored, dim=dim, programs=programs, requests=3, layers=2, padding=1)
    check_decode("cpu", torch.float32, seed=programs, heads=2, store_blocks=3, **options)


@pytest.mark.parametrize("block_size", [32, 64])
def test_decode_over_pages_of_several_tiles(block_size):
    options = dict(stored=INT4, block_size=block_size, store_blocks=2, requests=2, layers=1)
    check_decode("cpu", torch.float32, seed=2, dim=64, **options)


def test_decode_over_stores_in_few_bits_in_16_bits():
    options = dict(stored=INT4, dim=64, softcap=5.0, sinks=True, store_blocks=2, requests=2)
    check_decode("cpu", torch.float16, seed=3, layers=1, **options)


@pytest.mark.parametrize(
    ("stored", "dtype", "block_size"),
    [(INT4, torch.float32, 16), (INT8, torch.float16, 32)],
    ids=["int4", "int8"],
)
def test_unpacked_tokens(stored, dtype, block_size):
    # Of requests with a store and without, and of a batch that is padded.
    options = dict(block_size=block_size, dim=64, store_blocks=2, layers=1, padding=1)
    check_unpack("cpu", dtype, stored, seed=3, requests=4, longest_tail=150, **options)


@pytest.mark.parametrize("programs", [1, 5, 20])
def test_decode_sinks(programs):
    # Sequences of one piece and of several, and padding without keys.
    shape = dict(heads=3, group=2, longest_tail=200, padding=1)
    check_decode("cpu", torch.float32, seed=7, softcap=5.0, programs=programs, sinks=True, **shape)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_decode_head_sizes(dim):
    check_decode("cpu", torch.float32, seed=dim, dim=dim, requests=2, layers=1)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_decode_block_sizes(block_size):
    check_decode("cpu", torch.float32, seed=2, block_size=block_size, store_blocks=2, requests=3)


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 2), (2, 7), (4, 16)])
def test_decode_groups(heads, group):
    check_decode("cpu", torch.float32, seed=3, heads=heads, group=group, requests=2, layers=1)


@pytest.mark.parametrize("seed", range(6))
def test_decode_ragged(seed):
    # Store blocks of one page a head, pieces that cross pages, sequences longer than a slice.
    check_decode(
        "cpu",
        torch.float32,
        seed=seed,
        store_blocks=1 + 4 * (seed % 2),
        heads=2 + seed % 3,
        programs=(1, 5, 24)[seed % 3],
        smallest=(16, 64)[seed % 2],
        before=(0, 64)[seed // 2 % 2],
        longest_tail=(16, 200)[seed % 2],
        padding=seed % 3,
    )


@pytest.mark.parametrize("programs", [1, 3, 100])
@pytest.mark.parametrize(("requests", "before"), [(1, 0), (1, 48), (140, 64)])
def test_lengths_and_slices(programs, requests, before):
    options = dict(requests=requests, before=before, longest_tail=300, padding=2, layers=2)
    check_lengths_and_slices("cpu", programs, 64, seed=programs, **options)


def test_slices_over_several_blocks_of_sequences(monkeypatch):
    """A plan of more sequences than one of its programs describes, or adds up at once."""
    monkeypatch.setattr(slices, "_BLOCK", 16)
    monkeypatch.setattr(slices, "_WIDE_BLOCK", 64)
    check_lengths_and_slices("cpu", 70, 64, 32, seed=8, requests=50, heads=3, longest_tail=90)


def test_slices_of_stores_with_more_tokens_in_a_page():
    check_lengths_and_slices("cpu", 9, 64, 16, density=4, seed=6, longest_tail=200)


def test_smallest_slice():
    check_lengths_and_slices("cpu", 64, 192, seed=5, longest_tail=1000)


@pytest.mark.parametrize("seed", range(4))
def test_programs_side_by_side(seed, monkeypatch):
    """Another program's turn may come before any load, store or atomic of one."""
    options = dict(programs=6 + 6 * (seed % 2), smallest=32, requests=2, longest_tail=200)
    with interleaved(monkeypatch, seed) as turns:
        check_decode("cpu", torch.float32, seed=seed, padding=seed % 2, **options)
    assert turns.passed > 50


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("store_blocks", [1, 4])
def test_page_table(block_size, store_blocks):
    check_page_table(
        "cpu", seed=4, block_size=block_size, store_blocks=store_blocks, heads=3, padding=1
    )


def test_page_table_of_stores_with_more_tokens_in_a_page():
    check_page_table("cpu", density=4, seed=4, block_size=16, store_blocks=4, heads=3, padding=1)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("programs", [1, 100, 10_000])
def test_page_table_by_several_programs(programs, block, monkeypatch):
    """A sequence has up to 40 pages: many blocks, by one program, some, or one for each block."""
    monkeypatch.setattr(page_table, "_BLOCK", block)
    monkeypatch.setattr(page_table, "_PROGRAMS", programs)
    check_page_table("cpu", seed=4, block_size=16, store_blocks=4, heads=3, longest_tail=200)


def test_programs_of_a_page_table():
    """Few long sequences get many programs, many get one each; none gets more than it has work."""
    assert page_table._programs(8, 8192) == 64
    assert page_table._programs(512, 8192) == 8
    assert page_table._programs(4096, 8192) == page_table._programs(9999, 8192) == 1
    assert page_table._programs(8, 100) == 1


@pytest.mark.parametrize("block", [4, 128])
def test_a_page_table_records_queries(block, monkeypatch):
    monkeypatch.setattr(page_table, "_BLOCK", block)
    check_recording_page_table("cpu")


def test_observe():
    check_observe("cpu")


@pytest.mark.parametrize(
    ("dtype", "dim", "columns"),
    [(torch.float32, 80, 350), (torch.float16, 64, 1100), (torch.bfloat16, 256, 129)],
    ids=str,
)
def test_centers(dtype, dim, columns):
    check_centers("cpu", dtype, dim, columns)
