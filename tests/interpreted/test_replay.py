"""Decode steps captured once, and replayed for other requests with evictions between them."""

import pytest
import torch

from tests.interpreted.capture import Graph
from tests.interpreted.fakes import WINDOW, Backend, common_of
from tests.interpreted.test_backends import GROUP, close, queries
from tests.ragged import Ragged, random_ragged

SIZE = 4
LAYOUT = {
    "flash": ["_lengths_kernel"],
    "triton": ["_plan_kernel"],
}
"""Launches of a step for all layers, and below those of a layer."""
LAUNCHES = {
    "flash": ["_page_table_kernel", "flash_attn"],
    "triton": ["_attend_kernel"],
}


def graph_inputs(batches: list[Ragged]) -> Ragged:
    """What vLLM keeps at fixed addresses, wide enough for all; a dummy batch in it."""
    live = Ragged(**vars(batches[0]))
    live.seq_lens = torch.ones(SIZE, dtype=torch.int32)
    width = max(batch.block_table.shape[1] for batch in batches)
    live.block_table = torch.zeros(SIZE, width, dtype=torch.int32)
    most = max(batch.cache.shape[0] for batch in batches)
    live.cache = torch.zeros(most, *batches[0].cache.shape[1:])
    return live


def evict(backend: Backend, batch: Ragged) -> None:
    """The batch's requests take the places of those before."""
    for row in range(len(batch.tail_start)):
        backend.state.clear([row])
        if tail := int(batch.tail_start[row]):
            pages = batch.head_indptr[:, row].diff(dim=-1).long()
            backend.state.record(row, tail, batch.stores[row], pages)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_a_graph_serves_later_batches(kernel, sinks, monkeypatch):
    small = dict(heads=2, layers=2, block_size=16, longest_tail=40)
    batches = [
        random_ragged(seed, requests=requests, padding=SIZE - requests, **small)
        for seed, requests in ((5, 4), (1, 3), (2, 2))
    ]
    live = graph_inputs(batches)
    learned = torch.linspace(-2, 5, 2 * GROUP) if sinks else None
    backend = Backend(kernel, live, GROUP, SIZE, sinks=learned)
    for row in range(len(live.tail_start)):
        backend.state.clear([row])
    captured = backend.builder.build_for_cudagraph_capture(common_of(live, [1] * SIZE))
    query, graphs, outputs = queries(SIZE, live), [], []
    for layer in range(2):
        graphs.append(Graph())
        with graphs[-1].capturing(monkeypatch):
            outputs.append(backend.forward(layer, query, live.cache, captured))
        assert graphs[-1].launches == LAUNCHES[kernel]
    for batch in batches:
        evict(backend, batch)
        live.seq_lens.copy_(batch.seq_lens)
        live.block_table[:, : batch.block_table.shape[1]] = batch.block_table
        live.cache[: len(batch.cache)] = batch.cache
        query.copy_(queries(SIZE + len(batch.cache), batch)[:SIZE])
        requests = int((batch.seq_lens > 0).sum())
        slots = torch.arange(requests) - 1
        backend.step.update(rows=batch.rows[:requests].long(), slots=slots)
        layout = Graph(refused=())
        with layout.capturing(monkeypatch):
            backend.builder.build(0, common_of(live, [1] * SIZE))
        assert layout.launches == LAYOUT[kernel]
        for layer, (graph, out) in enumerate(zip(graphs, outputs, strict=True)):
            backend.rings.fill_(float("nan"))
            graph.replay()
            scale = query.shape[2] ** -0.5
            close(out, batch.attention(layer, query, scale, 0, learned))
            written = int((~backend.rings[layer].isnan()).flatten(1).all(1).sum())
            assert written == requests - 1
            entry = (int(batch.seq_lens[1]) - 1) % WINDOW
            assert torch.equal(backend.rings[layer, entry], query[1])


def test_a_capture_may_not_read_the_device(monkeypatch):
    with pytest.raises(RuntimeError, match="while capturing"), Graph().capturing(monkeypatch):
        bool(torch.zeros(1).any())
