"""Checks of the kernels for every query, on any device. Expectations loop over heads in float64."""

import torch

from tests.ragged import Ragged, random_ragged
from tests.triton_cases import TOLERANCE, lengths_of
from vllm_kvevict.ops.fp8 import typed
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.ops.triton.every_query import Sequences, add_column_sums, weighted_attention
from vllm_kvevict.ops.triton.packed import PackedStores
from vllm_kvevict.ops.triton.page_table import write_page_table
from vllm_kvevict.ops.triton.unpack import unpack_tokens

CHANNELS = 2


def drawn(
    device: str,
    dtype: torch.dtype,
    layer: int,
    stored: TokenFormat,
    group: int,
    most: int,
    softcap: float,
    sinks: bool,
    fp8: bool,
    **options: int,
) -> tuple[Ragged, Sequences, list[int]]:
    """A batch (as its tokens are meant), its sequences, and the queries of each request."""
    meant = on = random_ragged(dtype=dtype, **options)
    if not stored.as_cached:
        meant = on = on.packed(stored)
    key_scale = 0.07 if fp8 else 1.0
    if fp8:
        on, meant = on.quantised(key_scale, 0.03)
    batch, heads, count, size = on.to(device), on.num_heads, len(on.rows), on.block_size
    rand = torch.Generator().manual_seed(options["seed"])
    dim = on.cache.shape[3] // 2
    ones = [
        min(int(torch.randint(1, most + 1, (), generator=rand)), _tail(on, request))
        for request in range(count)
    ]
    per_sequence = torch.tensor(ones).repeat_interleave(heads)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), per_sequence.cumsum(0)]).int()
    queries = torch.randn(int(starts[-1]), group, dim, generator=rand).to(dtype)
    lengths = lengths_of(batch, on.page_tokens)[layer, : count * heads].contiguous()
    places = torch.arange(count, dtype=torch.int32, device=device)
    longest = int(lengths.max())
    shape = count * heads, -(-longest // size) + 2
    float_table = torch.full(shape, 2**30, dtype=torch.int32, device=device)
    write_page_table(
        batch.rows, places, batch.tail_start, batch.stores, batch.head_indptr[layer],
        batch.block_table, lengths, float_table, size, on.page_tokens,
    )  # fmt: skip
    table, pages = float_table, typed(batch.cache)
    if not stored.as_cached:
        packed = PackedStores.of(stored, dim, size, torch.device(device))
        dense = torch.empty(count * heads, shape[1] * size, 2 * dim, dtype=dtype, device=device)
        unpack_tokens(
            batch.rows, places, batch.tail_start, batch.stores, batch.head_indptr[layer],
            batch.block_table, lengths, batch.cache, packed, batch.centres, dense,
        )  # fmt: skip
        pages = dense
        table = torch.arange(count * heads * shape[1], dtype=torch.int32, device=device)
        table = table.view(shape)
    kept = [on.kept(layer, request, head) for request in range(count) for head in range(heads)]
    sequences = Sequences(
        queries=queries.to(device),
        starts=starts.to(device),
        lengths=lengths,
        pages=pages,
        table=table,
        float_table=float_table,
        stored_pages=torch.tensor(kept, dtype=torch.int32, device=device),
        heads=heads,
        block_size=size,
        page_tokens=on.page_tokens,
        max_queries=max(ones),
        longest=longest + 40,
        scale=0.3 * key_scale,
        softcap=softcap,
        sinks=torch.randn(heads, group, generator=rand).to(device) if sinks else None,
    )
    return meant, sequences, ones


def _tail(batch: Ragged, request: int) -> int:
    row = int(batch.rows[request])
    return int(batch.seq_lens[request]) - int(batch.tail_start[row])


def _float_places(batch: Ragged, layer: int, request: int, head: int) -> list[tuple[int, int]]:
    """Page and slot of each cached token in the tensor of floats."""
    pages, kept = batch.pages(layer, request, head), batch.kept(layer, request, head)
    stored = kept * batch.page_tokens
    return [
        (pages[n // batch.page_tokens], n % batch.page_tokens)
        if n < stored
        else (pages[kept + (n - stored) // batch.block_size], (n - stored) % batch.block_size)
        for n in range(batch.length(layer, request, head))
    ]


def _logits(
    batch: Ragged, sequences: Sequences, layer: int, sequence: int, count: int
) -> torch.Tensor:
    """[count, G, N] float64 capped logits, -inf for tokens after a query."""
    request, head = divmod(sequence, batch.num_heads)
    keys, _ = batch.tokens(layer, request, head)
    start = int(sequences.starts[sequence])
    queries = sequences.queries[start : start + count].cpu().double()
    logits = queries @ keys.T * 0.3
    if sequences.softcap:
        logits = sequences.softcap * torch.tanh(logits / sequences.softcap)
    seen = torch.arange(len(keys)) <= len(keys) - count + torch.arange(count)[:, None]
    return logits.masked_fill(~seen[:, None], float("-inf"))


def check_column_sums(
    device: str,
    dtype: torch.dtype,
    group: int = 2,
    most: int = 5,
    softcap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    stored: TokenFormat = AS_CACHED,
    **options: int,
) -> None:
    """The first float of each token grows by its softmax weights; no other float changes."""
    for layer in range(options.get("layers", 2)):
        meant, sequences, ones = drawn(
            device, dtype, layer, stored, group, most, softcap, sinks, fp8, **options
        )
        num_pages = meant.cache.shape[0] * meant.num_heads
        floats = torch.randn(num_pages, meant.page_tokens, CHANNELS)
        expected = floats.double()
        for sequence in range(len(sequences)):
            request, head = divmod(sequence, meant.num_heads)
            logits = _logits(meant, sequences, layer, sequence, ones[request])
            lse = logits.logsumexp(-1, keepdim=True)
            if sequences.sinks is not None:
                sink = sequences.sinks[head].cpu().double()[None, :, None]
                lse = torch.logaddexp(lse, sink.expand_as(lse))
            sums = (logits - lse).exp().sum((0, 1)) / group
            for n, place in enumerate(_float_places(meant, layer, request, head)):
                expected[(*place, 0)] += sums[n]
        found = floats.to(device)
        add_column_sums(sequences, found)
        tolerance = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def check_weighted(
    device: str,
    dtype: torch.dtype,
    group: int = 2,
    most: int = 5,
    softcap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    stored: TokenFormat = AS_CACHED,
    **options: int,
) -> None:
    """Attention with the log-weights of a store, some of them -inf, and none after it."""
    for layer in range(options.get("layers", 2)):
        meant, sequences, ones = drawn(
            device, dtype, layer, stored, group, most, softcap, sinks, fp8, **options
        )
        rand = torch.Generator().manual_seed(options["seed"] + 1)
        shape = meant.cache.shape[0] * meant.num_heads, meant.page_tokens, CHANNELS
        floats = torch.randn(shape, generator=rand) * 2
        floats[torch.rand(shape, generator=rand) < 0.2] = float("-inf")
        out = torch.full(sequences.queries.shape, float("nan"), dtype=dtype, device=device)
        weighted_attention(sequences, floats.to(device), out, 0.03 if fp8 else 1.0)
        for sequence in range(len(sequences)):
            request, head = divmod(sequence, meant.num_heads)
            count, start = ones[request], int(sequences.starts[sequence])
            places = _float_places(meant, layer, request, head)
            weights = torch.stack([floats[place] for place in places]).double()
            weights[meant.kept(layer, request, head) * meant.page_tokens :] = 0.0
            logits = _logits(meant, sequences, layer, sequence, count)
            _, values = meant.tokens(layer, request, head)
            above, below = (logits + weights[:, part] for part in (0, 1))
            total = below.exp().sum(-1, keepdim=True)
            if sequences.sinks is not None:
                total = total + sequences.sinks[head].cpu().double()[None, :, None].exp()
            expected = above.exp() @ values / total
            torch.testing.assert_close(
                out[start : start + count].cpu().double(),
                expected,
                atol=3 * TOLERANCE[dtype],
                rtol=3 * TOLERANCE[dtype],
            )
