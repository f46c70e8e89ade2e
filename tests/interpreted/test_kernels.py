"""Triton kernels in Triton's interpreter, in float32 and float16 (its bfloat16 dot is wrong)."""

import pytest
import torch

from tests.interpreted.interleave import interleaved
from tests.triton_cases import (
    check_centers,
    check_decode,
    check_lengths_and_splits,
    check_observe,
    check_page_table,
    check_recording_page_table,
)
from vllm_kvevict.ops.triton import page_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_types_and_softcap(dtype, softcap):
    check_decode("cpu", dtype, seed=1, softcap=softcap, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_decode_over_an_fp8_cache(dtype, softcap):
    check_decode("cpu", dtype, seed=6, softcap=softcap, padding=1, fp8=True)


@pytest.mark.parametrize("target", [1, 5, 64])
def test_decode_sinks(target):
    # Sequences of one split and of several, and padding without keys.
    shape = dict(heads=3, group=2, longest_tail=200, padding=1)
    check_decode("cpu", torch.float32, seed=7, softcap=5.0, target=target, sinks=True, **shape)


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
    # Store blocks of one page a head, splits that cross pages, sequences longer than a split.
    check_decode(
        "cpu",
        torch.float32,
        seed=seed,
        store_blocks=1 + 4 * (seed % 2),
        heads=2 + seed % 3,
        target=(1, 5, 64)[seed % 3],
        programs=1 + 4 * (seed % 2),
        longest_tail=(16, 200)[seed % 2],
        padding=seed % 3,
    )


@pytest.mark.parametrize("target", [1, 3, 1000])
@pytest.mark.parametrize("requests", [1, 140])
def test_lengths_and_splits(target, requests):
    check_lengths_and_splits(
        "cpu", target, 64, seed=target, requests=requests, longest_tail=300, padding=2, layers=2
    )


@pytest.mark.parametrize("order", range(3))
def test_splits_arrive_in_any_order(order):
    check_decode(
        "cpu", torch.float32, seed=9, order=order, target=40, programs=2, longest_tail=400, group=3,
        padding=1, sinks=order == 2,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_programs_side_by_side(seed, monkeypatch):
    """Another program's turn may come before any load, store or atomic of one."""
    options = dict(target=6 + 6 * (seed % 2), programs=3 + seed, requests=2, longest_tail=200)
    with interleaved(monkeypatch, seed) as turns:
        check_decode("cpu", torch.float32, seed=seed, padding=seed % 2, **options)
    assert turns.passed > 50


def test_smallest_split():
    check_lengths_and_splits("cpu", 64, 192, seed=5, longest_tail=1000)


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
