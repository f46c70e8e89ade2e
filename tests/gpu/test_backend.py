"""The CUDA backend with vLLM's FlashAttention: one layer, in a captured graph and out of it."""

import pytest
import torch

from tests.interpreted.fakes import Backend, common_of
from tests.ragged import Ragged, random_ragged
from vllm_kvevict.ops.token_format import AS_CACHED, INT4

pytestmark = pytest.mark.gpu
GROUP, DIM = 4, 128
# bfloat16 rounds the weights of the values, and the result, to 8 bits.
TOLERANCE = 3e-2


def batch_of(seed: int, requests: int, padding: int = 0) -> Ragged:
    return random_ragged(
        seed, torch.bfloat16, requests=requests, padding=padding, dim=DIM, heads=2, longest_tail=90
    )


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("stored", [AS_CACHED, INT4], ids=["16 bits", "int4"])
@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_a_decode_step_replayed_in_a_graph(kernel, stored):
    """Later batches are entered in place; nothing waits for the GPU; the replay sees them."""
    size = 8
    hosts = [batch_of(seed, 6, padding=2) for seed in (1, 2)]
    if not stored.as_cached:
        hosts = [host.packed(stored) for host in hosts]
    live = hosts[0].to("cuda")
    blocks = max(len(host.cache) for host in hosts)
    cache = torch.zeros(blocks, *live.cache.shape[1:], dtype=live.cache.dtype, device="cuda")
    live.cache = cache
    live.block_table = torch.zeros(size, 64, dtype=torch.int32, device="cuda")
    live.seq_lens = torch.ones(size, dtype=torch.int32, device="cuda")
    backend = Backend(kernel, live, GROUP, size)
    query = torch.randn(size, 2 * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    captured = backend.builder.build_for_cudagraph_capture(common_of(live, [1] * size))
    backend.forward(0, query, cache, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(0, query, cache, captured)
    for host in hosts:
        backend.state.clear(range(len(host.tail_start)))
        for row in range(len(host.tail_start)):
            if tail := int(host.tail_start[row]):
                pages = host.head_indptr[:, row].diff(dim=-1).long().cuda()
                backend.state.record(row, tail, host.stores[row].cuda(), pages)
        cache[: len(host.cache)].copy_(host.cache)
        live.seq_lens.copy_(host.seq_lens)
        live.block_table[:, : host.block_table.shape[1]] = host.block_table.cuda()
        backend.step.update(rows=host.rows[:6].long(), slots=torch.tensor([-1, 2, 0, -1, -1, -1]))
        # It copies from the host, which waits.
        common = common_of(live, [1] * size)
        backend.builder.build(0, common)  # compiles, where it must
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.builder.build(0, common)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = host.attention(0, query, DIM**-0.5, 0)
        close(out, expected)


@pytest.mark.parametrize("stored", [AS_CACHED, INT4], ids=["16 bits", "int4"])
@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_a_mixed_step(kernel, stored):
    host = batch_of(3, 6)
    if not stored.as_cached:
        host = host.packed(stored)
    evicted = host.tail_start[host.rows.long()] > 0
    assert evicted.any() and not evicted.all()
    counts = [1 + 3 * (request % 2) for request in range(6)]
    tails = host.seq_lens - host.tail_start[host.rows.long()]
    counts = [min(count, int(tail)) for count, tail in zip(counts, tails, strict=True)]
    assert max(counts) > 1
    batch = host.to("cuda")
    backend = Backend(kernel, batch, GROUP, 6)
    backend.step.update(rows=host.rows.long(), slots=torch.tensor([-1, 1, -1, -1, 2, -1]))
    metadata = backend.builder.build(0, common_of(batch, counts))
    query = torch.randn(sum(counts), 2 * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    out = backend.forward(1, query, batch.cache, metadata)
    token = 0
    for request, count in enumerate(counts):
        for within in range(count):
            part = Ragged(**vars(host))
            part.rows = host.rows[request : request + 1]
            part.seq_lens = host.seq_lens[request : request + 1] - (count - 1 - within)
            part.block_table = host.block_table[request : request + 1]
            expected = part.attention(1, query[token : token + 1], DIM**-0.5, 0)
            close(out[token : token + 1], expected)
            token += 1
