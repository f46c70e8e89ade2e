"""torch.library.opcheck on every operation: schemas, mutation, fake tensors, functionalisation."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda import fakes


def arguments(device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and arguments of one small call of each operation."""
    shape = Shape(1, 2, 16, 64, 8, (Lengths(0, 0, 2, 45, 1),), torch.float32)
    scene = Scene(shape, device)
    batch, indptr, stores = scene.batch, scene.head_indptr, scene.stores

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, device=device)

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    rings = [floats(3 * 8, 2, 64)]
    starts = torch.tensor([[0, 32]], device=device)
    tables = (batch.requests, indptr, stores, batch.positional)
    window = ([0.1], 0.0, 8, batch.max_columns, *tables)
    partial = empty(2, 1, 8, 2, dtype=torch.float32)
    as_cached = (16, 0, 0, [], floats(0))
    yield "window_lse", (floats(1, 1, 2, 8), partial, scene.caches, rings, *window, *as_cached)
    given = (floats(1, 1, 2, 8), scene.caches, rings, *window, *as_cached)
    yield "column_sums", (floats(1, batch.sums), *given)
    sums = floats(1, batch.sums)
    kept = [floats(scene.num_blocks * 2, 16, 2)]
    norms, totals = floats(batch.columns), floats(1, 1, 32)
    yield "window_peaks", (sums, *given)
    yield "value_norms", (norms, totals, scene.caches, *tables, 16)
    results = (floats(batch.columns), floats(batch.columns), floats(2))
    yield "defend", (*results, sums, norms, totals, kept, 8, batch.max_columns, *tables, 16)
    parts = floats(2, batch.columns)
    survivors = (torch.arange(16, device=device).repeat(2).int(), ints(1, 1).view(1, 1, 2))
    yield "keep_page_values", (kept, parts, *survivors, batch.store, *tables, 16)
    probes = (floats(1, 2, 4, 68), floats(1, 2), [floats(64, 32)], True, 32)
    yield "probe_keys", (parts, norms, totals, scene.caches, *probes, *tables, 16)
    networks = (floats(1, 2, 68, 5), floats(1, 2), [floats(64, 32)], True)
    yield "probe_networks", (parts, norms, totals, scene.caches, *networks, *tables, 16)
    read = (sums, norms, totals, floats(1, 2), kept, 8, batch.max_columns)
    yield "probe_scores", (floats(batch.columns), parts, floats(2), *read, *tables, 16)
    pooling = (batch.requests, indptr, 16, 16, 8, batch.max_columns, 0.1, 7, True)
    yield "pool", (floats(batch.columns), sums, *pooling)
    where = (empty(1, 2, dtype=torch.int64), empty(1, 2), empty(1, 2))
    where += (empty(1, dtype=torch.int64), empty(1))
    yield "rows", (*where, batch.requests, indptr, 16, 16)
    length = ints(32, 32).view(1, 2)
    work = (empty(64), empty(64), empty(4, dtype=torch.int64))
    caps = ints(2, 2).view(1, 2)
    yield "allocate", (empty(1, 2), *work, floats(64), starts, length, caps, ints(1), 16, 0.2)
    shares = torch.tensor([[0.5, 1.5]], dtype=torch.float64, device=device)
    gains = empty(4, dtype=torch.int64)
    yield "allocate_shares", (empty(1, 2), gains, shares, starts, caps, ints(1), 16)
    first = empty(1, dtype=torch.int64)
    pages = ints(1, 1).view(1, 2)
    yield "select", (empty(32), floats(64), starts, length, pages, first, 16)
    columns = torch.arange(16, device=device).repeat(2).int()
    yield (
        "compact",
        (
            scene.caches,
            columns,
            pages[None],
            batch.store,
            *tables,
            empty(0, dtype=torch.uint8),
            16,
            0,
            0,
            [],
            floats(0),
            [],
            [],
        ),
    )


def check(device: str, namespace: str) -> None:
    """Every operation, and none forgotten."""
    checked = []
    for name, values in arguments(device):
        operation = getattr(getattr(torch.ops, namespace), name).default
        torch.library.opcheck(operation, values)
        checked.append(name)
    assert sorted(checked) == sorted(fakes.OPERATIONS)
