"""What a launcher refuses: each error names the tensor or setting and what is valid."""

from dataclasses import replace

import pytest
import torch

from tests.emulation.build import NAMESPACE
from tests.kernels import probe, score
from tests.kernels.padded import adaptive_pages, select_tokens
from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.ops.cuda.allocate import batch_pages, batch_shared_pages
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.cuda.probe import NetworkLayers, probe_scores
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import pool, window_scores

pytestmark = pytest.mark.usefixtures("emulation")

CASE = score.CASES[3]


def network(
    rows: int, units: int, dtype: torch.dtype = torch.float32, heads: int = 3
) -> NetworkLayers:
    """Networks of two layers of three heads; weights of shares of ``heads`` heads."""
    return NetworkLayers(torch.ones(2, 3, rows, units, dtype=dtype), torch.ones(2, heads))


@pytest.fixture
def scene() -> Scene:
    return Scene(CASE.shape, "cpu")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rings=[torch.zeros(32, 4, 128)]), "caches, rings and scales must be of as many"),
        (dict(rings=[torch.zeros(32, 4, 72)] * 2), "must be one of 64, 80, 96, 128, 256, not 72"),
        (dict(rings=[torch.zeros(32, 3, 128)] * 2), "must be a multiple of KV heads"),
        (
            dict(rings=[torch.zeros(32, 4, 128).half()] * 2),
            "caches must have the dtype of the rings",
        ),
        (dict(rings=[torch.zeros(32, 4, 128).double()] * 2), "caches must have the dtype"),
        (dict(rings=[torch.zeros(40, 4, 128)] * 2), "whole slots of 32"),
        (dict(scales=[1.0]), "of as many layers, not 2, 2 and 1"),
        (dict(caches=[]), "1 to 128 layers, not 0"),
    ],
)
def test_score(scene, change, message):
    layers = score.layers_of(scene, CASE)
    with pytest.raises(RuntimeError, match=message):
        window_scores(scene.batch, replace(layers, **change))


def test_caches(scene):
    layers = score.layers_of(scene, CASE)
    strided = [
        torch.zeros(cache.shape[0], 4, 16, 256, dtype=cache.dtype)[:, ::2] for cache in scene.caches
    ]
    with pytest.raises(RuntimeError, match="caches must be contiguous"):
        window_scores(scene.batch, replace(layers, caches=strided))
    short = [cache[..., :64].contiguous() for cache in scene.caches]
    with pytest.raises(RuntimeError, match=r"must .* hold a key"):
        window_scores(scene.batch, replace(layers, caches=short))


def test_pool(scene):
    sums = torch.zeros(1, scene.batch.sums)
    with pytest.raises(RuntimeError, match="odd and at least 1, not 4"):
        pool(scene.batch, sums, scene.head_indptr, 1.0, 4, "max")
    with pytest.raises(ValueError, match="max or avg, not 'median'"):
        pool(scene.batch, sums, scene.head_indptr, 1.0, 3, "median")
    with pytest.raises(RuntimeError, match=r"assertion head\.first_sum"):
        pool(scene.batch, sums[:, :-1].contiguous(), scene.head_indptr, 1.0, 3, "max")


def test_what_only_the_device_sees():
    scores, caps = torch.ones(1, 2, 64), torch.tensor([[1, 2]])
    with pytest.raises(RuntimeError, match="assertion total >= 1 && total <= pages"):
        adaptive_pages(scores, caps, 2, 16, 0.2)
    with pytest.raises(RuntimeError, match="assertion kept >= 0 && kept <= length"):
        select_tokens(scores, torch.tensor([[5, 1]]), 16, 3)
    with pytest.raises(RuntimeError, match="assertion last > ordered"):
        padded = scores.index_fill(2, torch.arange(17), float("-inf"))
        select_tokens(padded, torch.tensor([[3, 3]]), 16, 3)


def test_compact_refuses_columns_and_pages_that_do_not_exist(scene):
    kept, shape = scene.batch.kept_columns, CASE.shape
    pages = torch.ones(3, shape.layers, shape.heads, dtype=torch.int32)
    columns = torch.full((kept,), 10**6, dtype=torch.int32)
    tables = (scene.batch, scene.head_indptr, scene.stores)
    with pytest.raises(RuntimeError, match="assertion column >= 0"):
        compact(scene.caches, columns, pages, *tables)
    with pytest.raises(RuntimeError, match="assertion flat < before"):
        compact(scene.caches, columns * 0, pages * 0, *tables)


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_floor(scene, floor):
    with pytest.raises(RuntimeError, match=r"floor must be in \[0, 1\]"):
        rows = candidate_rows(scene.batch, scene.head_indptr)
        batch_pages(scene.batch, torch.ones(scene.batch.columns), rows, floor)


@pytest.mark.parametrize(
    "shares, message",
    [
        (torch.ones(2, 2), "shares must be Double, not Float"),
        (torch.ones(2, 3).double(), r"shares must have shape \[any, 2\], not \[2, 3\]"),
        (torch.ones(4, 2).double(), "of the layers of each request, not of 4 for 6 of all"),
        (torch.zeros(2, 2).double(), "assertion share > 0"),
    ],
)
def test_fixed_shares(scene, shares, message):
    rows = candidate_rows(scene.batch, scene.head_indptr)
    with pytest.raises(RuntimeError, match=message):
        batch_shared_pages(scene.batch, shares, rows)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(weights=torch.ones(2, 3, 2, 65)), r"weights must have shape \[2, 3, any, 68\]"),
        (dict(weights=torch.ones(2, 3, 3, 68)), "probes of a head must be one of 2, 4, not 3"),
        (dict(channels=3), "parts must be one of 1, 2, not 3"),
        (dict(window_weights=torch.ones(2, 2)), r"window_weights must have shape \[2, 3\]"),
        (dict(rotary=[torch.ones(99, 64)]), "rotary must be of 2 layers, not 1"),
        (dict(rotary=[torch.ones(99, 62)] * 2), "a multiple of 4 dimensions, at most 64, not 62"),
        (dict(rotary=[torch.ones(99, 68)] * 2), "a multiple of 4 dimensions, at most 64, not 68"),
        (dict(rotary=[torch.ones(99, 64), torch.ones(98, 64)]), r"rotary must have shape \[99, 64"),
        (dict(rotary=[torch.ones(99, 64), torch.ones(99, 64).half()]), "rotary must be Float"),
        (dict(rotary=[torch.ones(99, 64).double()] * 2), "must be float32, float16, bfloat16"),
        (dict(rotary=[torch.ones(3, 64)] * 2), "assertion position"),
        (dict(kept=[torch.ones(9, 16, 1)] * 2), "2 numbers a token or more, not 1"),
        (dict(kept=[torch.ones(9, 16, 2)]), "numbers must be kept of 2 layers, not 1"),
        (dict(networks=network(68, 0)), "networks must have at least 1 unit"),
        (dict(networks=network(67, 5)), r"networks must have shape \[2, 3, 68, any\]"),
        (dict(networks=network(68, 5, heads=2)), r"weights of shares must have shape \[2, 3\]"),
        (dict(networks=network(68, 5, torch.half)), "networks must be Float, not Half"),
    ],
)
def test_probe(change, message):
    case, rotated = probe.CASES[0]
    scene = Scene(case.shape, "cpu")
    layers = probe.probes_of(scene, rotated, 2)
    with pytest.raises(RuntimeError, match=message):
        probe_scores(scene.batch, replace(layers, **change), None, lambda totals: totals)


def test_one_probe_does_not_join_a_window():
    case, rotated = probe.CASES[0]
    scene = Scene(case.shape, "cpu")
    window, layers = score.layers_of(scene, case), probe.probes_of(scene, rotated, 1)
    with pytest.raises(RuntimeError, match="joins the second of two parts, and there is 1"):
        probe_scores(scene.batch, layers, window, lambda totals: totals)


@pytest.mark.parametrize(
    "change",
    [
        dict(tail_start=40),
        dict(tail_start=16, old_tail_start=48),
        dict(num_tokens=47),
        dict(old_store_blocks=1),
        dict(positional=[1, 2, 3]),
        dict(store=[]),
        dict(store=[4, 5, 6, 7]),
        dict(row=-1),
        dict(protect_first=-1),
    ],
)
def test_a_request_that_contradicts_itself(change):
    good = Due(0, 0, 60, 0, 48, 0, [0, 1, 2, 3], [4, 5])
    EvictionBatch.build([good], 1, 1, 16, 8, torch.device("cpu"))
    with pytest.raises(ValueError):
        EvictionBatch.build([replace(good, **change)], 1, 1, 16, 8, torch.device("cpu"))


def test_an_empty_batch():
    with pytest.raises(ValueError, match="at least one"):
        EvictionBatch.build([], 1, 1, 16, 8, torch.device("cpu"))


def test_a_cuda_tensor_without_the_extension(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "LIBRARY", tmp_path / "_C.abi3.so")
    extension._load_installed.cache_clear()
    with pytest.raises(RuntimeError, match="installed without its CUDA extension"):
        extension._load_installed()
    extension._load_installed.cache_clear()


def test_a_driver_older_than_the_runtime_is_named(monkeypatch, tmp_path):
    assert extension.driver_obstacle(13000, 13010) is None
    assert extension.driver_obstacle(12080, 13000) is None
    said = extension.driver_obstacle(13000, 12080)
    assert "driver for CUDA 13.0 or newer" in said and "up to CUDA 12.8" in said
    assert "but there is none" in extension.driver_obstacle(13000, 0)
    monkeypatch.setattr(extension, "LIBRARY", tmp_path / "_C.abi3.so")
    assert "has no CUDA kernels (in a clone" in extension.obstacle()


@pytest.mark.usefixtures("emulation")
def test_a_gpu_without_kernels_is_named(monkeypatch, tmp_path):
    """The emulation, too, has none for a GPU."""
    monkeypatch.setattr(extension, "LIBRARY", tmp_path)
    monkeypatch.setattr(extension, "is_built", lambda: True)
    monkeypatch.setattr(extension, "_load_installed", lambda: None)
    monkeypatch.setattr(extension, "NAMESPACE", NAMESPACE)
    assert "not compiled for this GPU" in extension.obstacle()


def test_a_batch_bounds_what_it_does_not_know():
    """No head of any request has more columns than the batch says."""
    for seed in range(5):
        shape = Shape(2, 4, 16, 16, 3, (Lengths(3, 4, 6, 120, 2), Lengths(0, 0, 2, 40, 1)))
        scene = Scene(shape, "cpu", seed)
        for due in scene.due:
            most = int(scene.indptr(due).diff(dim=-1).max()) * 16
            assert most + due.num_tokens - due.old_tail_start <= scene.batch.max_columns
