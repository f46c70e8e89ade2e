"""xformers on evicted requests: its biases and its Python, its paged op in the interpreter.

Plain PyTorch stands in the place of PyTorch's CUTLASS kernel.
"""

from dataclasses import replace

import pytest
import torch
from xformers.ops.fmha import cutlass, triton_splitk
from xformers.ops.fmha.common import Inputs

from tests.interpreted.fakes import LONGEST, Backend, common_of
from tests.interpreted.test_backends import expected_at
from tests.ragged import Ragged, random_ragged
from vllm_kvevict.attention.xformers import attend as xformers

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.fixture
def ran(monkeypatch):
    """Ops that ran, and their inputs."""
    calls: list[tuple[type, Inputs]] = []
    run = xformers._run

    def record(op, inputs):
        calls.append((op, inputs))
        return run(op, inputs)

    monkeypatch.setattr(xformers, "_run", record)
    return calls


def check(batch: Ragged, counts: list[int], group: int, paged: bool, layers: int = 2) -> Backend:
    """Both layers of a step with ``counts`` query tokens per request."""
    backend = Backend("xformers", batch, group, len(counts))
    backend.builder.buffers.scratch.optional.paged = paged
    backend.step.update(rows=batch.rows.long(), slots=None)
    metadata = backend.builder.build(0, common_of(batch, counts))
    dim, dtype = batch.cache.shape[3] // 2, batch.cache.dtype
    rand = torch.Generator().manual_seed(sum(counts))
    shape = (sum(counts), batch.num_heads * group, dim)
    query = torch.randn(shape, generator=rand).to(dtype)
    for layer in range(layers):
        out = backend.forward(layer, query, batch.cache, metadata)
        expected = expected_at(batch, layer, query, counts)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    return backend


def some_counts(batch: Ragged, most: int) -> list[int]:
    """A query token each, several where the request is not evicted or has the tail for it."""
    tails = (batch.seq_lens - batch.tail_start[batch.rows.long()]).tolist()
    return [min(1 + index % 3 * most, tail) for index, tail in enumerate(tails)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gathered(seed, dtype, ran):
    """Questions, decodes, evicted or not, heads of one page; NaN wherever no sequence reads."""
    batch = random_ragged(seed, dtype, requests=6, store_blocks=1 + seed % 3, evicted_share=0.7)
    counts = some_counts(batch, 5)
    check(batch, counts, 1 + seed, paged=False)
    assert {op for op, _ in ran} == {cutlass.FwOp}


@pytest.mark.parametrize("tail", [1, 15, 16, 17, 32])
def test_page_boundaries(tail, ran):
    batch = random_ragged(1, requests=3, evicted_share=1.0, longest_tail=1)
    extra = (tail - 1) // batch.block_size
    free = len(batch.cache)
    batch.cache = torch.cat([batch.cache, torch.randn(3 * extra, *batch.cache.shape[1:])])
    for request, row in enumerate(batch.rows.tolist()):
        start = int(batch.tail_start[row])
        first = start // batch.block_size
        ids = torch.arange(free + request * extra, free + (request + 1) * extra)
        batch.block_table[request, first + 1 : first + 1 + extra] = ids
        batch.seq_lens[request] = start + tail
        block = int(batch.block_table[request, first])
        batch.cache[block] = torch.randn_like(batch.cache[block])
        last = int(batch.block_table[request, first + extra])
        batch.cache[last, :, tail - extra * batch.block_size :] = float("nan")
    check(batch, [min(tail, 7), 1, tail], 2, paged=False)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_on_pages(group, block_size, ran):
    """xformers' own Triton kernel; requests with several query tokens go to the other op."""
    options = dict(requests=5, block_size=block_size, longest_tail=100, evicted_share=0.8)
    batch = random_ragged(group, torch.float16, **options)
    evicted = batch.tail_start[batch.rows.long()] > 0
    counts = [1] * 5
    counts[int(evicted.nonzero()[-1])] = int(
        min(3, (batch.seq_lens - batch.tail_start[batch.rows.long()])[evicted][-1])
    )
    check(batch, counts, group, paged=True)
    paged = [op for op, _ in ran if issubclass(op, triton_splitk.FwOp)]
    assert [op.BLOCK_N for op in paged] == [64 if block_size == 64 else 16] * 2
    assert max(counts) == 1 or cutlass.FwOp in {op for op, _ in ran}


@pytest.mark.parametrize("paged", [False, True])
def test_a_decode_step(paged, ran):
    """No FULL graph: requests that are not evicted stay with vLLM's kernel."""
    batch = random_ragged(8, torch.float16, requests=5, evicted_share=0.6)
    backend = check(batch, [1] * 5, 4, paged)
    metadata = backend.builder.build(0, common_of(batch, [1] * 5))
    evicted = int((batch.tail_start[batch.rows.long()] > 0).sum())
    assert evicted == 3
    assert metadata.decode is None and metadata.extend is None
    assert len(metadata.single.rows) == evicted and metadata.stock is not None
    sequences = {len(inputs.attn_bias.k_seqinfo.seqlen) for _, inputs in ran}
    assert sequences == {8 if paged else 6}


def test_split_and_merged(monkeypatch, ran):
    """Sequences longer than a split, shorter ones whose later splits are empty, and padding."""
    monkeypatch.setattr(xformers, "MIN_SPLIT", 32)
    batch = random_ragged(8, torch.float16, requests=3, evicted_share=1.0, longest_tail=150)
    check(batch, [1] * 3, 4, paged=True)
    assert {op.SPLIT_K for op, _ in ran} == {32}


def test_parts_that_fit_the_buffer(monkeypatch, ran):
    batch = random_ragged(11, requests=5, evicted_share=1.0)
    counts = some_counts(batch, 4)
    whole = check(batch, counts, 2, paged=False)
    before = len(ran)
    scratch = whole.builder.buffers.scratch
    most = scratch.pages(1, LONGEST).numel() * 16 * 64 * 4 * 3
    monkeypatch.setattr("vllm_kvevict.attention.xformers.kernel.GATHERED_BYTES", most)
    small = check(batch, counts, 2, paged=False)
    assert small.builder.buffers.scratch.optional.dense.numel() == most
    assert len(ran) - before > before
    for _, inputs in ran[before:]:
        assert inputs.key.shape[1] * 64 * 4 <= most


def test_width_follows_the_store(ran):
    """A request of 1000 tokens with a store of 2 blocks and a tail of 8 needs few columns."""
    batch = random_ragged(2, requests=2, evicted_share=1.0, store_blocks=2, longest_tail=8)
    widths = []
    for tail_start in (96, 960):
        batch.block_table = torch.zeros(2, LONGEST // 16, dtype=torch.int32)
        for request, row in enumerate(batch.rows.tolist()):
            batch.tail_start[row] = tail_start
            batch.seq_lens[request] = tail_start + 8
            batch.block_table[request, tail_start // 16] = 1 + request
        backend = Backend("xformers", batch, 2, 2)
        backend.step.update(rows=batch.rows.long(), slots=None)
        common = common_of(batch, [1, 1]).replace(seq_lens_cpu_upper_bound=batch.seq_lens)
        widths.append(backend.builder.build(0, common).single.table.shape[1])
    # 2 blocks of 2 heads could all be one head's, and the tail is in a page of its own.
    assert widths == [8, 8]


@pytest.mark.parametrize("paged", [False, True])
def test_the_biases_themselves(paged, ran):
    """With true lengths in Python too, ``materialize`` allows each query just its keys."""
    batch = random_ragged(3, torch.float16, requests=4, evicted_share=1.0)
    counts = [1] * 4 if paged else some_counts(batch, 3)
    check(batch, counts, 2, paged, layers=1)
    for op, inputs in list(ran):
        bias = inputs.attn_bias
        lengths = bias.k_seqinfo.seqlen.tolist()
        bias = replace(bias, k_seqinfo=replace(bias.k_seqinfo, seqlen_py=lengths))
        tokens = len(lengths) * bias.k_seqinfo.padding
        allowed = bias.materialize((inputs.query.shape[1], tokens)) == 0
        one_head = (x[0].flatten(1, -2)[:, 0].double() for x in (inputs.key, inputs.value))
        keys, values = one_head
        queries = inputs.query[0].flatten(1, -2)
        result = xformers._run(op, inputs)[0].flatten(1, -2)
        for place, row in enumerate(allowed):
            seen = row.nonzero().flatten()
            logits = queries[place].double() @ keys[seen].T * inputs.scale
            expected = logits.softmax(-1) @ values[seen]
            torch.testing.assert_close(result[place].double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("paged", [False, True])
def test_ops_take_what_they_are_given(paged, ran):
    """But for the device, neither op has an objection of its own."""
    batch = random_ragged(5, torch.float16, requests=4, evicted_share=1.0)
    check(batch, [1] * 4, 2, paged, layers=1)
    for op, inputs in ran:
        assert [why for why in op.not_supported_reasons(inputs) if "device=cpu" not in why] == []
