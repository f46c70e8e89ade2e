"""Fitted values of a layer's store: heads of unequal pages, one at a time or all at once."""

from dataclasses import replace

import pytest
import torch

from tests.unit.ops.test_fit import D, outputs
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.fit import RIDGE
from vllm_kvevict.worker import fitted

BS, HEADS, PAGES, ROWS = 4, 3, 6, 16
KEPT = [1, 3, 2]


@pytest.fixture
def layer():
    """A cache of one layer, its candidates, and what is kept of them."""
    generator = torch.Generator().manual_seed(0)
    entries = torch.arange(2 * BS * D).view(2, BS, D)
    pages = torch.randn(40, 2 * BS * D, generator=generator)
    pages[0] = float("nan")
    cache = LayerCache(pages, PageLayout(entries[0], entries[1]), scale=D**-0.5, softcap=0.0)
    grid = torch.randperm(39, generator=generator)[: HEADS * PAGES].view(HEADS, PAGES) + 1
    grid[0, 0] = 0
    width = PAGES * BS - 1
    valid = torch.ones(HEADS, width, dtype=torch.bool)
    valid[0, :BS] = False
    candidates = Candidates(
        keys=cache.sequences(cache.keys(grid))[:, :width],
        valid=valid,
        queries=torch.randn(HEADS, 2, ROWS, D, generator=generator),
        window=ROWS,
        num_candidates=(PAGES - 1) * BS,
        scale=cache.scale,
    )
    # The first valid token stays: every query sees one.
    columns = [
        torch.cat([torch.zeros(1, dtype=torch.int64), others[: count * BS - 1].sort().values]) + BS
        for count in KEPT
        for others in [torch.randperm(15, generator=generator) + 1]
    ]
    return cache, candidates, grid, columns


@pytest.mark.parametrize("logits", [1, 2 * 2 * ROWS * 23, 2**22], ids=["1", "2", "all"])
def test_each_head_by_itself_whatever_stands_in_memory(layer, monkeypatch, logits):
    cache, candidates, grid, columns = layer
    monkeypatch.setattr(fitted, "LOGITS", logits)
    found = fitted.fitted_values(cache, candidates, grid, torch.cat(columns), torch.tensor(KEPT))
    values = cache.sequences(cache.values(grid))[:, : candidates.valid.shape[1]]
    values = values.masked_fill(~candidates.valid[..., None], 0.0)
    kept = torch.zeros(HEADS, candidates.num_candidates, dtype=torch.bool)
    for mine, columns_of_head in zip(kept, columns, strict=True):
        mine[columns_of_head] = True
    expected, known = [], candidates.keys.masked_fill(~candidates.valid[..., None], 0.0)
    candidates = replace(candidates, keys=known)
    for head, (full, few, basis) in enumerate(outputs(candidates, values, kept, ROWS)):
        mine = basis[:, columns[head]]
        normal = mine.T @ mine + RIDGE * torch.eye(mine.shape[1])
        shift = torch.linalg.solve(normal, mine.T @ (full - few))
        expected.append(values[head, columns[head]].double() + shift)
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=1e-3, atol=1e-3)
