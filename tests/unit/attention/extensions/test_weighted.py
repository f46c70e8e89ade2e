"""Attention with log-weights over head pages, against sums in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_kvevict.attention.extensions.weighted import WeightedBatch
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.worker.cpu import measure_layout

BLOCK, HEADS, GROUP, SIZE, BLOCKS = 32, 3, 2, 32, 40


def spelled_out(query, keys, values, above, below, scale, softcap, sink):
    """One query [D] over what it sees: the two sums of Algorithm 1, lines 29 to 31."""
    logits = (keys.double() @ query.double()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    numerator = (above.double() + logits).exp() @ values.double()
    return numerator / ((below.double() + logits).exp().sum() + sink.double().exp())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("counts, sinks", [([1, 1], False), ([3, 1], True), ([40], False)])
def test_rows_that_weigh(counts, sinks, softcap, dtype, tolerance):
    """Requests of a batch with others before, between and behind them, in one layer of two."""
    torch.manual_seed(0)
    keys, values = (torch.randn(BLOCKS, HEADS, BLOCK, SIZE).to(dtype) for _ in range(2))
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    halves = cache.view(BLOCKS, HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    flat = [x.transpose(1, 2).reshape(-1, HEADS, SIZE).contiguous() for x in (keys, values)]
    ops.cpu_attn_reshape_and_cache(*flat, *halves, torch.arange(BLOCKS * BLOCK), "vec")
    layout = measure_layout(BLOCK, SIZE, dtype, dtype, "vec")
    sink = torch.linspace(-2, 5, HEADS * GROUP).view(HEADS, GROUP).to(dtype)
    layer_cache = LayerCache(
        cache.view(BLOCKS * HEADS, -1), layout, SIZE**-0.5, softcap, sinks=sink if sinks else None
    )
    sink = sink if sinks else torch.full_like(sink, -math.inf)
    token_stats = torch.full((BLOCKS * HEADS, BLOCK, 3), math.nan)

    state = GroupState(0, ["a", "b"], EvictionRule(BLOCK, 1, 0, 128), HEADS, 6, 4096, "cpu")
    blocks = torch.randperm(BLOCKS - 2).view(2, -1) + 1
    log_weights = torch.randn(2, HEADS, 2 * BLOCK, 2)
    log_weights[:, :, 10:40, 0] = -math.inf
    log_weights[:, :, 30:60, 1] = -math.inf
    rows, tails, lengths = [4, 1], [64, 128], [64 + 45, 128 + 70]
    table = torch.zeros(8, 10, dtype=torch.int32)
    places = [1, 3][: len(counts)]
    for request, place in enumerate(places):
        store, own = blocks[request, :2], blocks[request, 2:12]
        pages = torch.full((2, HEADS), 2)
        state.record(rows[request], tails[request], store, pages, weighted=True)
        table[place] = own
        flat_pages = torch.arange(2 * HEADS)
        physical = store[flat_pages // HEADS] * HEADS + flat_pages % HEADS
        token_stats[physical, :, :2] = log_weights[request].view(-1, BLOCK, 2)
    queries_of = [2, 0, 5, 0, 1]
    for place, count in zip(places, counts, strict=True):
        queries_of[place] = count
    common = SimpleNamespace(
        query_start_loc=torch.tensor([0, *queries_of]).cumsum(0).int(),
        seq_lens=torch.tensor([9, lengths[0], 9, lengths[1], 9]),
        block_table_tensor=table,
        num_actual_tokens=sum(queries_of),
    )
    mine = torch.tensor(rows[: len(places)])
    batch = WeightedBatch.build(common, state, mine, torch.tensor(places))
    query = torch.randn(sum(queries_of), HEADS * GROUP, SIZE).to(dtype)
    output = torch.full_like(query, 77.0)
    batch.attend(layer_cache, token_stats, query, 1, output)

    starts = common.query_start_loc.tolist()
    untouched = torch.ones(sum(queries_of), dtype=torch.bool)
    for request, place in enumerate(places):
        tail = tails[request]
        stored, own = blocks[request, :2], blocks[request, 2:12]
        untouched[starts[place] : starts[place + 1]] = False
        for token in range(starts[place], starts[place + 1]):
            position = lengths[request] - (starts[place + 1] - token)
            for head in range(HEADS):
                flat_pages = torch.arange(2 * head, 2 * head + 2)
                held = stored[flat_pages // HEADS], flat_pages % HEADS
                late = [(own[p // BLOCK], head, p % BLOCK) for p in range(tail, position + 1)]
                seen = [
                    torch.cat([x[held].flatten(0, 1), torch.stack([x[place] for place in late])])
                    for x in (keys, values)
                ]
                weights = log_weights[request, head]
                weights = torch.cat([weights, torch.zeros(len(late), 2)])
                for one in range(head * GROUP, (head + 1) * GROUP):
                    expected = spelled_out(
                        query[token, one],
                        *seen,
                        *weights.T,
                        SIZE**-0.5,
                        softcap,
                        sink.flatten()[one],
                    )
                    got = output[token, one].double()
                    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert bool((output[untouched] == 77).all())
