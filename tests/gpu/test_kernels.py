"""The CUDA kernels on a GPU against the PyTorch reference: the cases of the emulation, larger ones,
CUDA graphs, and no host synchronisation."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.kernels import choose, observe, opcheck, pages, score
from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.observe import observe as observe_queries
from vllm_kvevict.ops.cuda.pages import compact, head_page_table
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


@pytest.mark.parametrize("case", observe.CASES)
def test_observe(case):
    observe.check("cuda", *case)


@pytest.mark.parametrize("heads, block_size", pages.TABLE_CASES)
def test_head_page_table(heads, block_size):
    pages.check_table("cuda", heads, block_size)


@pytest.mark.parametrize("shape", pages.COMPACT_CASES, ids=lambda s: f"{s.dtype}-{s.head_size}")
def test_compact(shape):
    pages.check_compact("cuda", shape)


@pytest.mark.parametrize("case", choose.CASES, ids=lambda case: "-".join(map(str, case)))
def test_allocate_and_select(case):
    for seed in range(20):
        choose.check_padded("cuda", *case, seed=seed)


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_allocate_and_select_a_batch(floor):
    choose.check_batch("cuda", choose.BATCH, floor)


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
            shared = batch_pages(batch, scores, scene.head_indptr, 0.2)
            columns = batch_columns(batch, scores, shared, scene.head_indptr)
            compact(scene.caches, columns, shared, batch, scene.head_indptr, scene.stores)
            results.append((scores, shared, columns))
    stream.synchronize()
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_a_graph_replays_observe_with_new_lengths():
    window, heads, size = 4, 2, 64
    rings = torch.zeros(2 * window, heads, size, device="cuda", dtype=torch.bfloat16)
    query = torch.zeros(3, heads, size, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    ring = torch.full((3,), -1, dtype=torch.int32, device="cuda")
    observe_queries(rings, query, starts, lengths, ring, window, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        observe_queries(rings, query, starts, lengths, ring, window, 1)
    query.copy_(torch.randn(query.shape))
    lengths.copy_(torch.tensor([7, 9, 30]))
    ring.copy_(torch.tensor([1, -1, 0]))
    graph.replay()
    expected = torch.zeros_like(rings)
    expected[window + 6 % window] = query[0]
    expected[29 % window] = query[2]
    assert torch.equal(rings, expected)


def test_a_graph_replays_the_page_table_with_new_rows():
    """Recorded while nothing is evicted, replayed when both requests are."""
    requests = (Lengths(2, 6, 7, 130, 1), Lengths(1, 2, 4, 100, 1))
    scene = Scene(Shape(2, 2, 16, 16, 1, requests), "cuda")
    blocks = torch.zeros(2, 9, dtype=torch.int32)
    for row, due in enumerate(scene.due):
        first = due.old_tail_start // 16
        blocks[row, first : first + len(due.positional)] = torch.tensor(due.positional)
    table = torch.full((2, 4, 12), -1, dtype=torch.int32, device="cuda")
    lengths = torch.full((2, 4), -1, dtype=torch.int32, device="cuda")
    rows = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(2, dtype=torch.int32, device="cuda")
    block_table = torch.zeros(2, 9, dtype=torch.int32, device="cuda")
    state = (scene.head_indptr, scene.stores, scene.tail_start)
    head_page_table(table, lengths, *state, rows, seq_lens, block_table, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head_page_table(table, lengths, *state, rows, seq_lens, block_table, 16)
    graph.replay()
    assert not table.any() and not lengths.any()
    rows.copy_(torch.tensor([due.row for due in scene.due]))
    seq_lens.copy_(torch.tensor([due.num_tokens for due in scene.due]))
    block_table.copy_(blocks)
    graph.replay()
    replayed = table.clone(), lengths.clone()
    head_page_table(table, lengths, *state, rows, seq_lens, block_table, 16)
    assert torch.equal(replayed[0], table) and torch.equal(replayed[1], lengths)
    assert table.any()
