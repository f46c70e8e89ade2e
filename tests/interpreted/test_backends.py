"""Our GPU backends' builders and forward passes, with a PyTorch FlashAttention under them."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from tests.e2e.paged import flash_attn_varlen_func
from tests.interpreted.fakes import LONGEST, WINDOW, Backend, common_of
from tests.ragged import Ragged, random_ragged
from vllm_kvevict.attention import scratch, unpacked
from vllm_kvevict.attention.gpu_backend import head_pages
from vllm_kvevict.attention.triton import EvictingTritonImpl
from vllm_kvevict.attention.warm_up import warm_up
from vllm_kvevict.ops.token_format import INT4, INT8

GROUP = 2

Scales = tuple[float, float, float] | None
"""Of queries, keys and values of an FP8 cache."""

SCALES = (0.5, 0.25, 4.0)

FP8 = pytest.mark.parametrize("scales", [None, SCALES], ids=["float32", "fp8"])


def queries(count: int, batch: Ragged) -> torch.Tensor:
    dim = batch.cache.shape[3] // 2
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, batch.num_heads * GROUP, dim, generator=generator)


def caches(batch: Ragged, scales: Scales) -> tuple[Ragged, Ragged]:
    """The batch as the backend gets it, and what its cache stands for."""
    return (batch, batch) if scales is None else batch.quantised(*scales[1:])


def shown(query: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as the backend gets them, and what they stand for."""
    if scales is None:
        return query, query
    given = (query / scales[0]).to(torch.float8_e4m3fn)
    return given, given.float() * scales[0]


def expected_at(
    batch: Ragged,
    layer: int,
    query: torch.Tensor,
    counts: list[int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query at a time: a token sees all but the tokens behind it."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    start = 0
    for request, count in enumerate(counts):
        for within in range(count):
            part = Ragged(**vars(batch))
            part.rows = batch.rows[request : request + 1]
            part.seq_lens = batch.seq_lens[request : request + 1] - (count - 1 - within)
            part.block_table = batch.block_table[request : request + 1]
            token = start + within
            mine = query[token : token + 1]
            out[token] = part.attention(layer, mine, query.shape[2] ** -0.5, 0, sinks)
        start += count
    return out


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


@FP8
@pytest.mark.parametrize("kernel", ["flash", "flash, many", "triton"])
def test_a_replayed_decode_step(kernel, scales, monkeypatch):
    """What was laid out for a dummy batch serves later batches whose requests are fewer."""
    kernel, *many = kernel.split(", ")
    if many:
        # More sequences than FlashAttention 3 splits: our kernel.
        monkeypatch.setattr(scratch, "MAX_SEQUENCES", 7)
    size = 4
    small = dict(heads=2, layers=2, block_size=16, requests=3, padding=1, longest_tail=40)
    batches = [random_ragged(seed, **small) for seed in (1, 2)]
    # vLLM's own buffers, which its graphs read, and the cache.
    live = Ragged(**vars(batches[0]))
    live.seq_lens = torch.ones(size, dtype=torch.int32)
    width = max(batch.block_table.shape[1] for batch in batches)
    live.block_table = torch.zeros(size, width, dtype=torch.int32)
    backend = Backend(kernel, live, GROUP, size, torch.float32, scales)
    captured = backend.builder.build_for_cudagraph_capture(common_of(live, [1] * size))
    assert captured.stock is None and captured.extend is None
    assert (captured.decode.slices is None) == (kernel == "flash" and not many)
    for batch in batches:
        for row in range(len(batch.tail_start)):
            backend.state.clear([row])
            if tail := int(batch.tail_start[row]):
                pages = batch.head_indptr[:, row].diff(dim=-1).long()
                backend.state.record(row, tail, batch.stores[row], pages)
        live.seq_lens.copy_(batch.seq_lens)
        live.block_table[:, : batch.block_table.shape[1]] = batch.block_table
        slots = torch.tensor([-1, 2, 0])
        backend.step.update(rows=batch.rows[:3].long(), slots=slots)
        backend.builder.build(0, common_of(live, [1] * size))
        stored, meant = caches(batch, scales)
        query, query_meant = shown(queries(size, batch), scales)
        for layer in range(2):
            backend.rings.fill_(float("nan"))
            out = backend.forward(layer, query, stored.cache, captured)
            close(out, meant.attention(layer, query_meant, query.shape[2] ** -0.5, 0))
            written = backend.rings[layer].isnan().logical_not().flatten(1).all(1)
            entries = {
                int(slots[place]) * WINDOW + (int(batch.seq_lens[place]) - 1) % WINDOW: place
                for place in (1, 2)
            }
            assert written.nonzero().flatten().tolist() == sorted(entries)
            for entry, place in entries.items():
                assert torch.equal(backend.rings[layer, entry], query[place].float())


@pytest.mark.parametrize(
    ("kernel", "scales"),
    [("flash", None), ("flash", SCALES), ("triton", None), ("triton", SCALES), ("xformers", None)],
)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_mixed_step(kernel, seed, scales):
    """Prefills, questions over an evicted context, and decodes, evicted and not, together."""
    batch = random_ragged(seed, requests=6, longest_tail=60, heads=2, layers=2, evicted_share=0.6)
    evicted = batch.tail_start[batch.rows.long()] > 0
    assert evicted.any() and not evicted.all()
    rand = torch.Generator().manual_seed(seed)
    tails = batch.seq_lens - batch.tail_start[batch.rows.long()]
    counts = [1 + int(torch.randint(min(int(n), 9), (1,), generator=rand)) for n in tails]
    counts[int(evicted.nonzero()[0])] = 1
    counts[-1] = int(tails[-1])
    assert max(counts) > 1
    stored, meant = caches(batch, scales)
    backend = Backend(kernel, batch, GROUP, 6, torch.float32, scales)
    slots = torch.tensor([-1, 1, -1, -1, 2, -1])
    backend.step.update(rows=batch.rows.long(), slots=slots)
    metadata = backend.builder.build(0, common_of(batch, counts))
    single = bool((evicted & (torch.tensor(counts) == 1)).any())
    assert (metadata.decode is not None) == (kernel != "xformers" and single)
    assert metadata.stock is not None
    if kernel == "flash":
        reserved = metadata.buffers.scratch.table
        assert metadata.extend.table.data_ptr() == reserved.data_ptr(), "a table of its own"
    query, query_meant = shown(queries(sum(counts), batch), scales)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    for layer in range(2):
        backend.rings.fill_(float("nan"))
        out = backend.forward(layer, query, stored.cache, metadata)
        close(out, expected_at(meant, layer, query_meant, counts))
        for place in (1, 4):
            for back in range(1, min(counts[place], WINDOW) + 1):
                position = int(batch.seq_lens[place]) - back
                entry = int(slots[place]) * WINDOW + position % WINDOW
                token = query[starts[place + 1] - back].float()
                assert torch.equal(backend.rings[layer, entry], token)
        recorded = sum(min(counts[place], WINDOW) for place in (1, 4))
        assert int((~backend.rings[layer].isnan()).flatten(1).all(1).sum()) == recorded


@pytest.mark.parametrize("kernel", ["flash", "triton"])
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 2]], ids=["decode", "mixed"])
def test_attention_sinks(kernel, counts):
    """A sink for each query head, in every path: stock, decode, several queries."""
    batch = random_ragged(16, requests=3, longest_tail=50)
    evicted = batch.tail_start[batch.rows.long()] > 0
    assert evicted.any() and not evicted.all()
    sinks = torch.linspace(-2, 5, batch.num_heads * GROUP)
    backend = Backend(kernel, batch, GROUP, 3, sinks=sinks)
    backend.step.update(rows=batch.rows.long(), slots=None)
    metadata = backend.builder.build(0, common_of(batch, counts))
    query = queries(sum(counts), batch)
    for layer in range(2):
        out = backend.forward(layer, query, batch.cache, metadata)
        close(out, expected_at(batch, layer, query, counts, sinks))


@pytest.mark.parametrize(
    ("kernel", "counts", "stored"),
    [
        ("flash", [1, 1, 1, 1], INT4),
        ("flash", [3, 4, 1, 5], INT4),
        pytest.param("triton", [1, 1, 1, 1], INT8, marks=pytest.mark.nightly),
        pytest.param("triton", [2, 7, 1, 1], INT8, marks=pytest.mark.nightly),
    ],
    ids=["decode", "mixed", "decode, int8", "mixed, int8"],
)
def test_stores_in_few_bits(kernel, counts, stored, monkeypatch):
    """Decode steps read them as they are; for several queries one request at a time is unpacked."""
    batch = random_ragged(27, requests=4, dim=64, store_blocks=2, longest_tail=50)
    tails = batch.seq_lens - batch.tail_start[batch.rows.long()]
    assert bool((tails >= torch.tensor(counts)).all())
    batch = batch.packed(stored)
    evicted = batch.tail_start[batch.rows.long()] > 0
    assert evicted.any() and not evicted.all()
    monkeypatch.setattr(unpacked, "DENSE_BYTES", 1)
    places = memory_of_unpacked_tokens(monkeypatch)
    backend = Backend(kernel, batch, GROUP, 4)
    backend.step.update(rows=batch.rows.long(), slots=None)
    metadata = backend.builder.build(0, common_of(batch, counts))
    assert metadata.decode is None or metadata.decode.slices is not None
    query = queries(sum(counts), batch)
    for layer in range(2):
        places.clear()
        out = backend.forward(layer, query, batch.cache, metadata)
        close(out, expected_at(batch, layer, query, counts))
        # Start-up counts the memory of one piece.
        several = int((evicted & (torch.tensor(counts) > 1)).sum())
        assert len(places) == several and len(set(places)) == min(1, several)


def memory_of_unpacked_tokens(monkeypatch) -> list[int]:
    """Addresses to which requests are unpacked, as steps run."""
    real, places = unpacked.unpack_tokens, list[int]()

    def unpack_tokens(*arguments):
        places.append(arguments[-1].data_ptr())
        real(*arguments)

    monkeypatch.setattr(unpacked, "unpack_tokens", unpack_tokens)
    return places


@pytest.mark.parametrize("stored", [INT4, INT8], ids=["int4", "int8"])
def test_the_warm_up_stays_within_its_buffers(stored, monkeypatch):
    """A page of a store has more tokens than a block: it takes several blocks to fill it."""
    batch = random_ragged(5, requests=2, layers=1, dim=64).packed(stored)
    backend = Backend("flash", batch, GROUP, 2)
    size, heads, real, seen = batch.block_size, batch.num_heads, unpacked.unpack_tokens, []

    def unpack_tokens(rows, places, tails, stores, split, table, lengths, cache, packed, *last):
        index = rows.long()
        later = lengths - split[index].diff().flatten() * packed.page_tokens
        ends = tails[index].repeat_interleave(heads) + later
        assert later.tolist() == [2] * len(lengths)
        assert int(lengths.max()) <= last[-1].shape[1] and int(ends.max()) <= table.shape[1] * size
        seen.append(len(rows))
        real(rows, places, tails, stores, split, table, lengths, cache, packed, *last)

    monkeypatch.setattr(unpacked, "unpack_tokens", unpack_tokens)
    one = torch.ones(())
    layer = SimpleNamespace(
        impl=backend.impl, kv_cache=batch.cache, layer_name="layer.0", query_quant=None,
        _k_scale_float=1.0, _v_scale_float=1.0, _q_scale=one, _k_scale=one, _v_scale=one,
    )  # fmt: skip
    warm_up([layer], backend.builder.binding, backend.builder.buffers, batch.cache.dtype)
    assert seen == [1, 2]


def test_attention_sinks_through_vllms_triton_attention():
    """Several queries of evicted requests, a KV head after another."""
    batch = random_ragged(12, requests=3, evicted_share=1.0, heads=3, longest_tail=40)
    counts = [3, 2, 4]
    assert bool((batch.seq_lens - batch.tail_start[batch.rows.long()] >= 4).all())
    sinks = torch.linspace(-2, 5, batch.num_heads * GROUP)
    backend = Backend("triton", batch, GROUP, 3, sinks=sinks)
    impl = EvictingTritonImpl.__new__(EvictingTritonImpl)
    vars(impl).update(vars(backend.impl), _kv_quant_mode=get_kv_quant_mode("auto"))
    backend.impl = impl
    backend.step.update(rows=batch.rows.long(), slots=None)
    metadata = backend.builder.build(0, common_of(batch, counts))
    assert metadata.decode is None and metadata.stock is None
    query = queries(sum(counts), batch)
    out = backend.forward(1, query, batch.cache, metadata)
    close(out, expected_at(batch, 1, query, counts, sinks))


@pytest.mark.parametrize("kernel", ["flash", "triton", "xformers"])
def test_only_evicted_requests(kernel):
    batch = random_ragged(8, requests=2, evicted_share=1.0, longest_tail=40)
    counts = [min(3, int(batch.seq_lens[0] - batch.tail_start[batch.rows[0]])), 1]
    assert counts[0] == 3
    backend = Backend(kernel, batch, GROUP, 2)
    backend.step.update(rows=batch.rows.long(), slots=None)
    metadata = backend.builder.build(0, common_of(batch, counts))
    assert metadata.stock is None and metadata.recording is None
    query = queries(sum(counts), batch)
    out = backend.forward(0, query, batch.cache, metadata)
    close(out, expected_at(batch, 0, query, counts))


def test_outside_a_step_no_request_is_evicted():
    """Profiling and warm-up carry no requests, whatever rows of the state say."""
    batch = random_ragged(9, requests=3, evicted_share=1.0, longest_tail=30)
    backend = Backend("flash", batch, GROUP, 3)
    dummy = Ragged(**vars(batch))
    dummy.rows = torch.full((3,), -1, dtype=torch.int32)
    dummy.seq_lens = torch.tensor([5, 1, 9], dtype=torch.int32)
    dummy.block_table = torch.randint(1, len(batch.cache), batch.block_table.shape).int()
    dummy.cache = torch.randn_like(batch.cache)
    metadata = backend.builder.build(0, common_of(dummy, [1, 1, 1]))
    query = queries(3, batch)
    out = backend.forward(1, query, dummy.cache, metadata)
    close(out, dummy.attention(1, query, query.shape[2] ** -0.5, 0))
    assert backend.builder.build(0, common_of(dummy, [5, 1, 9])).max_seq_len == LONGEST


@FP8
def test_several_queries_through_vllms_triton_attention(scales):
    """What the backend for GPUs without FlashAttention makes of a question over evicted pages."""
    torch.manual_seed(0)
    page, dim, lengths, counts = 16, 32, [37, 16], [3, 1]
    cache, query = torch.randn(6, 2, page, 2 * dim), torch.randn(4, GROUP, dim)
    table = torch.tensor([[7, 2, 9], [4, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    impl = EvictingTritonImpl.__new__(EvictingTritonImpl)
    impl.scale, impl.logits_soft_cap = dim**-0.5, 0.0
    impl._kv_quant_mode = get_kv_quant_mode("auto" if scales is None else "fp8")
    query_scale, key_scale, value_scale = (torch.tensor(x) for x in scales or (1.0, 1.0, 1.0))
    layer = SimpleNamespace(_q_scale=query_scale, _k_scale=key_scale, _v_scale=value_scale)
    if scales is not None:
        parts = torch.tensor(scales[1:]).repeat_interleave(dim)
        stored = (cache / parts).to(torch.float8_e4m3fn)
        cache = stored.float() * parts
    given, query = shown(query, scales)
    pages = head_pages(cache if scales is None else stored.view(torch.uint8))
    seqused = torch.tensor(lengths, dtype=torch.int32)
    out, expected = torch.full_like(query, float("nan")), torch.empty_like(query)
    impl.attend_pages(layer, given, *pages, out, starts, seqused, table, 3, 64, 0, None)
    rest = (seqused, 64, dim**-0.5, True, table)
    flash_attn_varlen_func(query, *head_pages(cache), expected, starts, max(counts), *rest)
    # With FP8 queries that kernel rounds the weights of the values to FP8, 4 bits, too.
    tolerance = 2e-5 if scales is None else 6e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
