"""Checks of the Triton kernels on any device: the interpreter's in CI, a GPU's in tests/gpu."""

from itertools import groupby

import torch

from tests.ragged import Ragged, random_ragged
from vllm_kvevict.ops.fp8 import typed
from vllm_kvevict.ops.token_format import PackedFormat
from vllm_kvevict.ops.torch.centers import EXACT
from vllm_kvevict.ops.torch.centers import greedy_centers as reference
from vllm_kvevict.ops.triton.centers import greedy_centers
from vllm_kvevict.ops.triton.decode import Ring, decode_attention
from vllm_kvevict.ops.triton.merge import Partials
from vllm_kvevict.ops.triton.observe import observe_tokens
from vllm_kvevict.ops.triton.packed import PackedStores
from vllm_kvevict.ops.triton.page_table import write_page_table
from vllm_kvevict.ops.triton.slices import WORDS, Slices, head_lengths, plan_slices
from vllm_kvevict.ops.triton.unpack import unpack_tokens

# float32 sums in another order; float16 and bfloat16 round the weights of the values to 11 and
# 8 bits, and the result once more.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def lengths_of(batch: Ragged, page_tokens: int | None = None) -> torch.Tensor:
    device = batch.rows.device
    count = len(batch.rows)
    lengths = torch.full((batch.num_layers, count * batch.num_heads + 3), -9, dtype=torch.int32)
    lengths = lengths.to(device)
    places = torch.arange(count, dtype=torch.int32, device=device)
    head_lengths(
        batch.rows,
        places,
        batch.seq_lens,
        batch.tail_start,
        batch.head_indptr,
        lengths,
        page_tokens or batch.block_size,
    )
    return lengths


def slices_of(
    batch: Ragged,
    tokens: torch.Tensor,
    programs: int,
    smallest: int,
    before: int,
    page_tokens: int,
) -> Slices:
    count, device = len(batch.rows), batch.rows.device
    slices = Slices.room(batch.num_layers, count * batch.num_heads, programs, device)
    slices.pieces.fill_(-9)
    plan_slices(
        batch.rows,
        torch.arange(count, dtype=torch.int32, device=device),
        tokens,
        batch.seq_lens,
        batch.tail_start,
        batch.head_indptr,
        slices,
        batch.block_size,
        page_tokens,
        smallest,
        before,
    )
    return slices


def check_decode(
    device: str,
    dtype: torch.dtype,
    group: int = 4,
    softcap: float = 0.0,
    programs: int = 3,
    smallest: int = 64,
    before: int = 16,
    fp8: bool = False,
    sinks: bool = False,
    stored: PackedFormat | None = None,
    size: float = 1.0,
    **options: float,
) -> None:
    """Decode attention of a random batch against lists of pages in float64, twice under one plan.

    ``fp8`` stores keys, values and queries in FP8, with scales of powers of two. Every other
    request records its query. ``stored`` is the format of stores in few bits, with values of
    ``size``.
    """
    host = random_ragged(dtype=dtype, **options)
    query_scale, key_scale, value_scale, batch = 1.0, 1.0, 1.0, host
    if fp8:
        query_scale, key_scale, value_scale = 0.5, 0.25, 4.0
        batch, host = host.quantised(key_scale, value_scale)
    if stored is not None:
        batch = host = host.packed(stored, size=size)
    batch = batch.to(device)
    heads, dim = batch.num_heads, batch.cache.shape[3] // 2
    count = len(batch.rows)
    query = torch.randn(count, heads * group, dim, generator=torch.Generator().manual_seed(1))
    query = query.to(dtype).to(device)
    out_like = torch.empty_like(query)
    if fp8:
        query = (query / query_scale).to(torch.float8_e4m3fn)
    places = torch.arange(count, dtype=torch.int32, device=device)
    tokens = torch.randperm(count).to(torch.int32).to(device)
    slices = slices_of(batch, tokens, programs, smallest, before, batch.page_tokens)
    packed = None
    if stored is not None:
        packed = PackedStores.of(stored, dim, batch.block_size, torch.device(device))
    partials = Partials.room(programs, group, dim, torch.device(device))
    partials.sums.fill_(float("nan"))
    partials.weights.fill_(float("nan"))
    window, entries = 4, (count * 4, heads * group, dim)
    recorded = (places % 2 == 1) & (batch.seq_lens > 0)
    slots = torch.where(recorded, count - 1 - places, -1).to(torch.int32)
    sink = torch.linspace(-2, 6, heads * group) if sinks else None
    for layer in range(batch.num_layers):
        out = torch.full_like(out_like, float("nan"))
        rings = torch.full(entries, float("nan"), dtype=dtype, device=device)
        ring = Ring(rings, slots, batch.seq_lens, window) if layer % 2 == 0 else None
        decode_attention(
            query,
            typed(batch.cache),
            out,
            batch.stores,
            batch.block_table,
            slices,
            layer,
            partials,
            dim**-0.5 * query_scale * key_scale,
            softcap,
            3,
            value_scale,
            None if sink is None else sink.to(device),
            ring,
            packed,
            batch.centres,
        )
        assert not partials.arrived.any(), "counters are not reset"
        meant = query.float().cpu()[tokens.long().cpu()] * query_scale
        expected = host.attention(layer, meant, dim**-0.5, softcap, sink)
        tolerance = TOLERANCE[dtype]
        result, expected = out[tokens.long()].cpu().double() / size, expected / size
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
        expected_rings = torch.full_like(rings, float("nan"))
        for place in range(1, count, 2) if ring is not None else ():
            if length := int(host.seq_lens[place]):
                entry = (count - 1 - place) * window + (length - 1) % window
                expected_rings[entry] = query[tokens[place]].to(dtype)
        torch.testing.assert_close(rings, expected_rings, rtol=0, atol=0, equal_nan=True)


def check_unpack(device: str, dtype: torch.dtype, stored: PackedFormat, **options: float) -> None:
    """The tokens of each sequence are in order, and zeros fill the rest of its last page."""
    host = random_ragged(dtype=dtype, **options).packed(stored)
    batch = host.to(device)
    count, heads, size = len(batch.rows), batch.num_heads, batch.block_size
    places = torch.arange(count, dtype=torch.int32, device=device)
    packed = PackedStores.of(stored, batch.cache.shape[3] // 2, size, torch.device(device))
    lengths = lengths_of(batch, batch.page_tokens)[:, : count * heads]
    longest = -(-int(lengths.max()) // size) * size + size
    for layer in range(batch.num_layers):
        shape = (count * heads, longest, batch.cache.shape[3])
        dense = torch.full(shape, float("nan"), dtype=dtype, device=device)
        unpack_tokens(
            batch.rows, places, batch.tail_start, batch.stores, batch.head_indptr[layer],
            batch.block_table, lengths[layer].contiguous(), batch.cache, packed, batch.centres,
            dense,
        )  # fmt: skip
        for sequence, found in enumerate(dense.cpu()):
            request, head = divmod(sequence, heads)
            length = host.length(layer, request, head)
            whole = -(-length // size) * size
            if length:
                expected = torch.cat(host.tokens(layer, request, head), -1)
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(
                    found[:length].double(), expected, atol=tolerance, rtol=tolerance
                )
            assert not found[length:whole].any()
            assert bool(found[whole:].isnan().all())


def check_lengths_and_slices(
    device: str,
    programs: int,
    smallest: int,
    before: int = 0,
    density: int = 1,
    **options: int,
) -> None:
    """The pieces of each program are those of a list of all keys that is cut into equal parts."""
    host = random_ragged(**options)
    batch = host.to(device)
    page_tokens = density * batch.block_size
    lengths = lengths_of(batch, page_tokens).cpu()
    count, heads = len(batch.rows), batch.num_heads
    tokens = torch.arange(count, dtype=torch.int32, device=device).flip(0) + 5
    plan = slices_of(batch, tokens, programs, smallest, before, page_tokens)
    most = 0
    for layer in range(batch.num_layers):
        tails = [int(host.tail_start[row]) if row >= 0 else 0 for row in host.rows.tolist()]
        stored = [
            int(host.head_indptr[layer, row].diff()[head]) * page_tokens if tail else 0
            for row, tail in zip(host.rows.tolist(), tails, strict=True)
            for head in range(heads)
        ]
        expected = [
            int(host.seq_lens[s // heads]) - tails[s // heads] + stored[s]
            for s in range(count * heads)
        ]
        assert lengths[layer].tolist() == [*expected, -9, -9, -9]
        row_of_keys = [
            (sequence, key)
            for sequence, length in enumerate(expected)
            for key in range(-before, max(16, -(-length // 16) * 16))
        ]
        size = max(smallest, before + 16, -(-len(row_of_keys) // (16 * programs)) * 16)
        wanted = []
        for program in range(programs):
            keys = row_of_keys[program * size : (program + 1) * size]
            keys = [at for at in keys if at[1] >= 0]
            mine = [(s, [key for _, key in part]) for s, part in groupby(keys, lambda at: at[0])]
            wanted.append([(s, part[0], min(part[-1] + 1, expected[s])) for s, part in mine])
        pieces = plan.pieces[layer].tolist()
        found: list[list[tuple[int, int, int]]] = []
        for program in range(programs):
            found.append([])
            partial = 0
            at, sequence = program, pieces[program][10]
            while sequence >= 0:
                numbers = pieces[at]
                assert len(numbers) == WORDS and numbers[10] == sequence
                found[-1].append((sequence, numbers[6], numbers[7]))
                request, head = divmod(sequence, heads)
                row = int(host.rows[request])
                assert numbers[:3] == [row, request, int(tokens[request])]
                first = int(host.head_indptr[layer, row, head]) if tails[request] else 0
                block = tails[request] // batch.block_size
                assert numbers[3:6] == [first, stored[sequence], block]
                holders = [p for p in range(programs) if sequence in [s for s, *_ in wanted[p]]]
                assert numbers[8:10] == [holders[0], len(holders)]
                partial += len(holders) > 1
                at, sequence = programs + sequence + 1, sequence + 1 if numbers[11] else -1
            most = max(most, partial)
        assert found == wanted
    assert most <= 2 and (most > 0 or programs == 1)


def check_page_table(device: str, density: int = 1, **options: int) -> None:
    """The table is the list of pages of each sequence, and nothing else is touched.

    The pages do not depend on how many tokens those of the store hold.
    """
    host = random_ragged(**options)
    batch = host.to(device)
    page_tokens = density * batch.block_size
    lengths = lengths_of(batch, page_tokens)
    count, heads = len(batch.rows), batch.num_heads
    places = torch.arange(count, dtype=torch.int32, device=device)
    for layer in range(batch.num_layers):
        table = torch.full((count * heads, 40), -9, dtype=torch.int32, device=device)
        write_page_table(
            batch.rows,
            places,
            batch.tail_start,
            batch.stores,
            batch.head_indptr[layer],
            batch.block_table,
            lengths[layer],
            table,
            batch.block_size,
            page_tokens,
        )
        for sequence, row in enumerate(table.tolist()):
            pages = host.pages(layer, sequence // heads, sequence % heads)
            assert row == pages + [-9] * (40 - len(pages))


def check_recording_page_table(device: str, dtype: torch.dtype = torch.float32) -> None:
    """The launch writes the queries of every other request to the rings, and the same table."""
    window, group, dim, width = 4, 3, 48, 40
    host = random_ragged(4, heads=3, padding=1)
    batch = host.to(device)
    count, heads = len(batch.rows), batch.num_heads
    query = torch.randn(count, heads * group, 2 * dim).to(dtype)[..., :dim]
    slots = torch.full((count,), -1, dtype=torch.int32)
    slots[::2] = torch.arange(len(slots[::2]), dtype=torch.int32).flip(0)
    slots[host.rows < 0] = -1
    assert 1 < int((slots >= 0).sum()) < count
    rings = torch.full((count * window, heads * group, dim), float("nan")).to(dtype)
    expected = rings.clone()
    for request in (slots >= 0).nonzero().flatten().tolist():
        length = int(host.seq_lens[request])
        expected[int(slots[request]) * window + (length - 1) % window] = query[request]
    rings, places = rings.to(device), torch.arange(count, dtype=torch.int32, device=device)
    ring = Ring(rings, slots.to(device), batch.seq_lens, window)
    for layer, more in ((0, (query.to(device), ring)), (0, ())):
        table = torch.full((count * heads, width), -9, dtype=torch.int32, device=device)
        write_page_table(
            batch.rows, places, batch.tail_start, batch.stores, batch.head_indptr[layer],
            batch.block_table, lengths_of(batch)[layer], table, batch.block_size,
            batch.block_size, *more,
        )  # fmt: skip
        for sequence, row in enumerate(table.tolist()):
            pages = host.pages(layer, sequence // heads, sequence % heads)
            assert row == pages + [-9] * (width - len(pages))
    torch.testing.assert_close(rings.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_observe(device: str, dtype: torch.dtype = torch.float32) -> None:
    """Recorded queries lie where their position says; all other entries stay as they were."""
    window, heads, dim = 4, 3, 48
    query = torch.randn(9, heads, 2 * dim).to(dtype)[..., :dim]
    seq_lens = torch.tensor([13, 6], dtype=torch.int32)
    tokens, places, back, slots = [1, 2, 3, 8], [0, 0, 0, 1], [3, 2, 1, 1], [2, 2, 2, -1]
    rings = torch.full((5 * window, heads, dim), float("nan")).to(dtype)
    expected = rings.clone()
    for token, position in ((1, 10), (2, 11), (3, 12)):
        expected[2 * window + position % window] = query[token]
    rings = rings.to(device)
    numbers = (torch.tensor(x, dtype=torch.int32).to(device) for x in (tokens, places, back, slots))
    observe_tokens(rings, query.to(device), seq_lens.to(device), *numbers, window)
    torch.testing.assert_close(rings.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_centers(device: str, dtype: torch.dtype, dim: int, columns: int) -> None:
    """The centres are those of the reference if sums are exact, and farthest otherwise."""
    heads, count = 4, 12
    made = torch.Generator().manual_seed(dim)
    # Integers have exact sums, and many distances are equal.
    points = torch.randint(-2, 3, (heads, columns + 16, dim), generator=made).to(dtype)
    points = points[:, :columns]
    points[1, 90:95] = points[1, 80:85]
    points[2, 70], points[2, 71, 0] = float("nan"), float("inf")
    points[2, 326:327] = 9  # The thread of the key that is no number has another, far one.
    valid = torch.arange(columns) >= torch.tensor([0, 1, 64, columns - count])[:, None]
    transposed = points.mT.contiguous().mT
    for given in (points, transposed, torch.zeros(heads, columns, dim, dtype=dtype)):
        chosen = greedy_centers(given.to(device), valid.to(device), count)
        assert chosen.tolist() == reference(given.float(), valid, count).tolist()
    assert greedy_centers(points.to(device), valid.to(device), 0).shape == (heads, 0)
    points = torch.randn(heads, columns, dim, generator=made).to(dtype)
    chosen = greedy_centers(points.to(device), valid.to(device), count).cpu()
    distances = torch.cdist(points.double(), points.double(), compute_mode=EXACT)
    for head, columns_of_head in enumerate(chosen.tolist()):
        assert columns_of_head[0] == int(valid[head].nonzero()[0])
        assert len(set(columns_of_head)) == count
        away = distances[head][columns_of_head].cummin(0).values
        for number, column in enumerate(columns_of_head[1:]):
            farthest = away[number][valid[head]].max()
            assert valid[head, column] and away[number, column] >= farthest * (1 - 1e-6)
