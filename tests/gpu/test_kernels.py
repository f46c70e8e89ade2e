"""The CUDA kernels on a GPU against the PyTorch reference: the cases of the emulation, larger ones,
and no host synchronisation."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.kernels import choose, defensive, keep, opcheck, packed, pages, probe, score
from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import window_scores
from vllm_kvevict.ops.cuda.select import batch_columns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not extension.is_built(),
        reason="no CUDA extension: KVEVICT_CUDA=1 pip install --no-build-isolation --no-deps -e .",
    ),
]


@contextmanager
def unsynchronised() -> Iterator[None]:
    """Any wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", pages.COMPACT_CASES, ids=lambda s: f"{s.dtype}-{s.head_size}")
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_compact(shape, in_place):
    pages.check_compact("cuda", shape, in_place)


@pytest.mark.parametrize("case", choose.CASES, ids=lambda case: "-".join(map(str, case)))
def test_allocate_and_select(case):
    for seed in range(20):
        choose.check_padded("cuda", *case, seed=seed)


@pytest.mark.parametrize("shape", packed.COMPACT_CASES, ids=range(len(packed.COMPACT_CASES)))
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_compact_to_few_bits(shape, in_place):
    packed.check_compact("cuda", shape, in_place)


def test_elements_that_are_no_numbers_in_few_bits():
    packed.check_odd_elements("cuda")


@pytest.mark.parametrize("case", packed.CASES, ids=range(len(packed.CASES)))
def test_scores_of_stores_in_few_bits(case):
    score.check_scores("cuda", case)
    defensive.check_scores("cuda", case)


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("shape", [choose.BATCH, choose.STORED], ids=["as cached", "in few bits"])
def test_allocate_and_select_a_batch(shape, floor):
    choose.check_batch("cuda", shape, floor)


@pytest.mark.parametrize("kind", ["few", "steep"])
@pytest.mark.parametrize("shape", [choose.BATCH, choose.LONG], ids=["short", "long"])
def test_allocate_by_fixed_shares(shape, kind):
    for seed in range(20):
        choose.check_shares("cuda", shape, kind, seed)


@pytest.mark.parametrize("kind", ["attention", "ties", "odd"])
def test_allocate_and_select_among_131072_tokens(kind):
    choose.check_padded("cuda", 8, 131072 // 16, 16, 256, 0.2, kind)


@pytest.mark.parametrize("case", score.CASES, ids=range(len(score.CASES)))
def test_window_scores(case):
    score.check_scores("cuda", case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_window_scores_of_long_requests(dtype, head_size, block_size):
    blocks = 8192 // block_size
    requests = (
        Lengths(0, 0, blocks, blocks * block_size + 32 + 3, 4),
        Lengths(4, 40, blocks - 9, blocks * block_size - 100, 4),
    )
    queries = torch.bfloat16 if dtype.itemsize == 1 else dtype
    shape = Shape(2, 2, block_size, head_size, 32, requests, dtype)
    score.check_scores("cuda", score.Case(shape, 4, queries))


def test_window_scores_of_131072_tokens():
    shape = Shape(1, 1, 16, 128, 32, (Lengths(0, 0, 8190, 131072, 64),), torch.bfloat16)
    score.check_scores("cuda", score.Case(shape, 4, torch.bfloat16))


def test_a_key_that_is_not_a_number():
    score.check_not_a_number("cuda", score.CASES[0])


@pytest.mark.parametrize("case", [score.CASES[0], score.CASES[7]], ids=["half", "float"])
def test_column_sums_of_a_given_lse(case):
    score.check_column_sums("cuda", case)


def test_an_eviction_from_queries_to_store():
    score.check_eviction("cuda", score.EVICTION)


@pytest.mark.parametrize("case", score.CASES, ids=range(len(score.CASES)))
def test_defensive_scores(case):
    defensive.check_scores("cuda", case)


def test_defensive_and_a_key_that_is_not_a_number():
    defensive.check_not_a_number("cuda", score.CASES[0])


@pytest.mark.parametrize("made, channels", [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_numbers_of_survivors(made, channels):
    keep.check_keep("cuda", score.EVICTION, made, channels)


@pytest.mark.parametrize("case", probe.CASES, ids=range(len(probe.CASES)))
def test_probe_scores(case):
    probe.check_scores("cuda", *case)


def test_probe_beside_another_rank():
    probe.check_ranks("cuda", *probe.CASES[0])


@pytest.mark.parametrize(
    "case, units", zip(probe.CASES, probe.UNITS, strict=True), ids=range(len(probe.CASES))
)
def test_probe_networks(case, units):
    probe.check_scores("cuda", *case, units)


@pytest.mark.parametrize("case", [probe.CASES[0], probe.CASES[7]], ids=["bfloat16", "fp8"])
def test_networks_of_two_ranks(case):
    probe.check_networks_of_ranks("cuda", *case)


@pytest.mark.parametrize("units", [0, 32])
def test_probe_of_tokens_without_values(units):
    probe.check_without_values("cuda", *probe.CASES[0], units)


def test_probe_of_a_key_without_bounds():
    probe.check_infinite("cuda", *probe.CASES[0])


@pytest.mark.parametrize("units", [0, 32])
def test_probe_and_a_key_that_is_not_a_number(units):
    probe.check_not_a_number("cuda", *probe.CASES[0], units)


def test_opcheck():
    opcheck.check("cuda", extension.NAMESPACE)


def test_an_eviction_never_waits_and_repeats_bit_by_bit():
    """The whole pass, twice, on a stream of its own."""
    case = score.EVICTION
    scene = Scene(case.shape, "cuda")
    layers = score.layers_of(scene, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    results = []
    with unsynchronised(), torch.cuda.stream(stream):
        for _ in range(2):
            batch = EvictionBatch.build(
                scene.due,
                case.shape.layers,
                case.shape.heads,
                case.shape.block_size,
                case.shape.window,
                scene.device,
            )
            scores = window_scores(batch, layers)
            rows = candidate_rows(batch, scene.head_indptr)
            shared = batch_pages(batch, scores, rows, 0.2)
            columns = batch_columns(batch, scores, shared, rows)
            compact(scene.caches, columns, shared, batch, scene.head_indptr, scene.stores)
            results.append((scores, shared, columns))
    stream.synchronize()
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
