"""Sharing a layer's budget between heads, against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality.head_split import EQUAL, UNIT, Split, found, keep_mask, spread
from benchmarks.quality.heads_report import head_spread, summarise


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page=st.sampled_from([1, 16, 32]),
    floor=st.sampled_from([0.0, 0.2, 0.8]),
    units=st.integers(1, 3),
)
def test_masks_keep_the_same_total_and_single_tokens_the_best(seed, page, floor, units):
    torch.manual_seed(seed)
    layers, heads, columns, point = 2, 3, 4 * UNIT, 4 * UNIT + 9
    scores = torch.rand(layers, heads, columns) ** 4
    equal = keep_mask(scores, EQUAL, units, point)
    mask = keep_mask(scores, Split(page, floor), units, point)

    assert mask[:, :, columns:].all() and equal[:, :, columns:].all()
    total = heads * units * UNIT
    assert mask[:, :, :columns].sum((1, 2)).tolist() == [total] * layers
    for layer in range(layers):
        for head in range(heads):
            best = sorted(range(columns), key=lambda i: -scores[layer, head, i])
            kept = equal[layer, head, :columns].nonzero().flatten().tolist()
            assert kept == sorted(best[: units * UNIT])
            least = max(1, int(floor * units * UNIT / page)) * page
            assert mask[layer, head, :columns].sum() >= least
        if page == 1 and floor == 0.0:
            # Every head keeps one token; the rest are the best of the layer.
            chosen = scores[layer].argmax(-1).add(torch.arange(heads) * columns).tolist()
            others = scores[layer].flatten().argsort(descending=True).tolist()
            wanted = {*chosen, *[i for i in others if i not in chosen][: total - heads]}
            assert set(mask[layer, :, :columns].flatten().nonzero().flatten().tolist()) == wanted


def test_spread_is_the_share_that_holds_the_mass():
    attention = torch.zeros(1, 2, 100)
    attention[0, 0, 7] = 1.0
    attention[0, 1] = 0.01
    assert 0.88 < spread(attention)[0][1] < 0.91
    assert spread(attention)[0][0] < 0.02


def test_found_is_the_first_place():
    assert found((5, 1, 2, 3, 1, 2), [1, 2]) == slice(1, 3)
    assert found((5, 1), [2]) is None


def test_summary_pairs_samples_and_skips_cells_that_some_prompt_lacks():
    def sample(equal: float, shared: float, extra: bool) -> dict:
        def cell(score: float) -> dict:
            return {"score": score, "attention": 0.5, "moved": 0.0, "needle": [1.0, 0.0]}

        cells = {"aware/10/equal": cell(equal), "aware/10/adaptive": cell(shared)}
        if extra:
            cells["aware/40/equal"] = cell(1.0)
        return {"cells": cells, "spread": {"aware": [[0.1, 0.3]]}}

    results = {"lines": [sample(0.0, 1.0, True), sample(1.0, 1.0, False)]}
    entries = summarise(results)
    assert [(e["budget"], e["split"]) for e in entries] == [("10%", "equal"), ("10%", "adaptive")]
    assert entries[1]["minus_equal"]["mean"] == 0.5
    assert entries[1]["heads_with_needle"] == 0.5
    assert head_spread(results, "aware") == [[0.1, 0.3]]
