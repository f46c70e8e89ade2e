"""Page tables and compaction, against a cache of named tokens walked one at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.cpu import page_table
from vllm_kvevict.ops.torch.pages import candidate_grid, compact_index, head_page_table


@st.composite
def evicted_request(draw, heads: int, layers: int, block_size: int, fresh):
    """A request after an eviction, with distinct blocks: (indptr, store, T, n, block table)."""
    store = draw(st.integers(1, 3))
    indptr = []
    for _ in range(layers):
        cuts = (
            draw(
                st.lists(
                    st.integers(1, store * heads - 1),
                    min_size=heads - 1,
                    max_size=heads - 1,
                    unique=True,
                )
            )
            if heads > 1
            else []
        )
        indptr.append([0, *sorted(cuts), store * heads])
    first = draw(st.integers(1, 3))
    tail = draw(st.integers(1, 3 * block_size))
    tail_blocks = -(-tail // block_size)
    table = [0] * first + [fresh() for _ in range(tail_blocks)]
    tail_start = first * block_size
    return indptr, [fresh() for _ in range(store)], tail_start, tail_start + tail, table


def counter():
    """Fresh block ids, none twice, in an order that is not sorted."""
    ids = iter((i * 7919) % 10007 + 1 for i in range(10006))
    return lambda: next(ids)


@pytest.mark.parametrize(
    "lay_out", [head_page_table, page_table.head_page_table], ids=["torch", "numpy"]
)
@settings(deadline=None)
@given(
    data=st.data(),
    heads=st.integers(1, 4),
    layers=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 4]),
    density=st.sampled_from([1, 4]),
    count=st.integers(1, 4),
)
def test_head_page_table(lay_out, data, heads, layers, block_size, density, count):
    fresh = counter()
    requests = [data.draw(evicted_request(heads, layers, block_size, fresh)) for _ in range(count)]
    width = max(len(table) for *_, table in requests)
    stores = max(len(store) for _, store, *_ in requests)
    pages, lengths = lay_out(
        torch.tensor([[r[0][layer] for r in requests] for layer in range(layers)]),
        torch.tensor([r[1] + [0] * (stores - len(r[1])) for r in requests]),
        torch.tensor([r[2] for r in requests]),
        torch.tensor([r[3] for r in requests]),
        torch.tensor([r[4] + [0] * (width - len(r[4])) for r in requests]),
        block_size,
        density * block_size,
    )
    for layer in range(layers):
        for r, (indptr, store, tail_start, n, table) in enumerate(requests):
            flat = [(block, i) for block in store for i in range(heads)]
            for head in range(heads):
                mine = [
                    block * heads + i
                    for block, i in flat[indptr[layer][head] : indptr[layer][head + 1]]
                ]
                stored = len(mine) * density * block_size
                for position in range(tail_start, n, block_size):
                    mine.append(table[position // block_size] * heads + head)
                row = pages[layer, r * heads + head].tolist()
                assert row[: len(mine)] == mine
                assert not any(row[len(mine) :])
                assert int(lengths[layer, r * heads + head]) == stored + n - tail_start


@settings(deadline=None)
@given(
    data=st.data(),
    heads=st.integers(1, 4),
    layers=st.integers(1, 2),
    block_size=st.sampled_from([1, 2, 4]),
    evicted=st.booleans(),
)
def test_candidates_and_compaction_move_the_right_tokens(data, heads, layers, block_size, evicted):
    """Fill a cache with names, pick survivors at random, compact, and read the store back."""
    fresh = counter()
    indptr, store, tail_start, n, table = data.draw(
        evicted_request(heads, layers, block_size, fresh)
    )
    if not evicted:
        indptr, store, tail_start = [[0] * (heads + 1)] * layers, [], 0
        table = [fresh() for _ in range(-(-n // block_size))]
    positional = table[tail_start // block_size :]
    candidate_blocks = data.draw(
        st.integers(0 if store else 1, n // block_size - tail_start // block_size)
    )
    new_store = data.draw(st.integers(1, max(1, candidate_blocks + len(store))))
    grid, padding = candidate_grid(
        torch.tensor(indptr), torch.tensor(store, dtype=torch.long), torch.tensor(positional)
    )
    cache = {}
    tokens = [[[] for _ in range(heads)] for _ in range(layers)]
    for layer in range(layers):
        flat = [block * heads + i for block in store for i in range(heads)]
        for head in range(heads):
            own = flat[indptr[layer][head] : indptr[layer][head + 1]]
            own += [block * heads + head for block in positional[:candidate_blocks]]
            for page in own:
                for slot in range(block_size):
                    name = (layer, head, len(tokens[layer][head]))
                    cache[layer, page, slot] = name
                    tokens[layer][head].append(name)
    caps = [[len(mine) // block_size for mine in layer] for layer in tokens]
    if any(sum(row) < new_store * heads for row in caps) or any(0 in row for row in caps):
        return
    pages, columns, expected = [], [], []
    for layer in range(layers):
        left = new_store * heads
        share = []
        for head in range(heads):
            after = caps[layer][head + 1 :]
            low = max(1, left - sum(after))
            high = min(caps[layer][head], left - len(after))
            share.append(data.draw(st.integers(low, high)))
            left -= share[-1]
        pages.append(share)
        row, names = [], []
        for head in range(heads):
            mine = len(tokens[layer][head])
            kept = sorted(data.draw(st.permutations(range(mine)))[: share[head] * block_size])
            row += [index + int(padding[layer, head]) * block_size for index in kept]
            names += [tokens[layer][head][index] for index in kept]
        columns.append(row)
        expected.append(names)
    target_blocks = [fresh() for _ in range(new_store)]
    source, slot, target = compact_index(
        grid, torch.tensor(columns), torch.tensor(pages), torch.tensor(target_blocks), block_size
    )
    assert target.tolist() == [b * heads + i for b in target_blocks for i in range(heads)]
    for layer in range(layers):
        moved = [
            cache[layer, page, s]
            for page, s in zip(source[layer].tolist(), slot[layer].tolist(), strict=True)
        ]
        assert moved == expected[layer]
