"""Attention added up over steps, on pages: stock and evicted rows, chunks of any size."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.extensions import query_sums
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

BLOCK, HEADS, GROUP, SIZE, BLOCKS = 4, 2, 2, 3, 40
OFFSETS = torch.arange(2 * BLOCK * SIZE).view(2, BLOCK, SIZE)
SCALE = SIZE**-0.5
SINKS = {"a": None, "b": torch.tensor([[-1.0, 2.0], [0.5, 3.0]])}
"""Of the layers: [H, G]."""


class Pool:
    """Two layers of a cache, its numbers, and the binding that a backend would call."""

    def __init__(self) -> None:
        self.names = ["a", "b"]
        self.caches = {
            name: LayerCache(
                torch.zeros(BLOCKS * HEADS, 2 * BLOCK * SIZE),
                PageLayout(OFFSETS[0], OFFSETS[1]),
                SCALE,
                0.0,
                sinks=SINKS[name],
            )
            for name in self.names
        }
        self.values = TokenStats(self.caches, dict.fromkeys(self.names, HEADS), 1)
        for name in self.names:
            self.values.layer(name).fill_(torch.nan)  # recycled blocks hold anything
            self.values.layer(name)[0] = 0
        rule = EvictionRule(BLOCK, 1, 0, budget_tokens=5)
        self.state = GroupState(0, self.names, rule, HEADS, 8, 256, torch.device("cpu"))
        self.accumulating: list[int] = []
        self.batch = torch.tensor([])
        worker = SimpleNamespace(
            extensions=[query_sums.QuerySums(self.caches, self.values)],
            batch_rows=lambda common: self.batch,
            batch_accumulating=lambda common: torch.tensor(self.accumulating),
        )
        self.binding = GroupBinding(worker, self.state)

    def write(self, name, block, slot, keys) -> None:
        """keys [H, SIZE] of one token."""
        pages = self.caches[name].pages.view(BLOCKS, HEADS, 2, BLOCK, SIZE)
        pages[block, :, 0, slot] = keys

    def step(self, spans, tables, keys, queries) -> None:
        """``spans`` {row: (start, end)} in batch order; keys and queries by layer and row."""
        counts = [end - start for start, end in spans.values()]
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        slots = [
            tables[row][p // BLOCK] * BLOCK + p % BLOCK
            for row, (start, end) in spans.items()
            for p in range(start, end)
        ]
        for name in self.names:
            for row, (start, end) in spans.items():
                for p in range(start, end):
                    self.write(name, tables[row][p // BLOCK], p % BLOCK, keys[name][row][:, p])
        width = max(len(tables[row]) for row in spans)
        table = torch.zeros(len(spans), width, dtype=torch.int32)
        for index, row in enumerate(spans):
            table[index, : len(tables[row])] = torch.tensor(tables[row])
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([end for _, end in spans.values()], dtype=torch.int32),
            num_reqs=len(spans),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=256,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
        )
        self.batch = torch.tensor(list(spans))
        ((extension, batch),) = self.binding.extended(common)
        for name in self.names:
            query = torch.cat([queries[name][row][:, start:end] for row, (start, end)
                               in spans.items()], dim=1)  # [Hq, T, D]  # fmt: skip
            # vLLM pads batches.
            padded = torch.cat([query.transpose(0, 1), torch.full((2, *query.shape[::2]), 9.0)])
            extension.forward(self.state, name, padded, batch, padded)


def matrix(queries, keys, first, last, seen, sinks):
    """[H, n] float64: what queries [first, last) give; head h sees ``seen[h]`` and, causally,
    itself and everything from ``first`` on."""
    n = keys.shape[1]
    sums = torch.zeros(HEADS, n, dtype=torch.float64)
    for head in range(HEADS):
        for g in range(GROUP):
            for i in range(first, last):
                mask = torch.zeros(n, dtype=torch.bool)
                mask[seen[head]] = True
                mask &= torch.arange(n) <= i
                logits = SCALE * keys[head].double() @ queries[head * GROUP + g, i].double()
                weights = logits.masked_fill(~mask, -torch.inf).exp()
                sink = 0 if sinks is None else sinks[head, g].double().exp()
                sums[head] += weights / (weights.sum() + sink) / GROUP
    return sums


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_prefill_and_decode_in_any_chunks(data):
    """Stock rows: the sums are those of one full softmax matrix, however they were cut."""
    lengths = data.draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))
    skipped = data.draw(st.integers(-1, len(lengths) - 1))  # a row of another policy
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    pool = Pool()
    free = iter((torch.randperm(BLOCKS - 1) + 1).tolist())
    tables = {row: [next(free) for _ in range(blocks_for(n, BLOCK))]
              for row, n in enumerate(lengths)}  # fmt: skip
    keys = {m: {r: torch.randn(HEADS, n, SIZE) for r, n in enumerate(lengths)} for m in pool.names}
    queries = {m: {r: torch.randn(HEADS * GROUP, n, SIZE) for r, n in enumerate(lengths)}
               for m in pool.names}  # fmt: skip
    done = [0] * len(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_sums, "ELEMENTS", data.draw(st.sampled_from([1, 100, 2**22])))
        while done != lengths:
            due = [r for r in range(len(lengths)) if done[r] < lengths[r]]
            rows = data.draw(st.permutations(due))
            spans = {}
            for row in rows[: data.draw(st.integers(1, len(rows)))]:
                count = data.draw(st.integers(1, lengths[row] - done[row]))
                spans[row] = (done[row], done[row] + count)
                done[row] += count
            pool.accumulating = [i for i, row in enumerate(spans) if row != skipped]
            if pool.accumulating:
                pool.step(spans, tables, keys, queries)
    for name in pool.names:
        values = pool.values.layer(name)[..., 0].view(BLOCKS, HEADS, BLOCK)
        for row, n in enumerate(lengths):
            if row == skipped:
                continue
            got = torch.stack([values[tables[row][p // BLOCK], :, p % BLOCK] for p in range(n)], 1)
            everything = [range(n)] * HEADS
            inputs = queries[name][row], keys[name][row]
            expected = matrix(*inputs, 0, n, everything, SINKS[name])
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [9]], ids=str)
def test_evicted_rows_give_weights_to_survivors_only(chunks):
    """Heads that kept 1 and 3 pages; beside a row that is not evicted."""
    torch.manual_seed(0)
    pool = Pool()
    n, tail_start, row, other = 25, 16, 5, 2
    tables = {row: [0, 0, 0, 0, 11, 12, 13], other: [21, 22, 23]}
    keys = {m: {row: torch.randn(HEADS, n, SIZE), other: torch.randn(HEADS, 9, SIZE)}
            for m in pool.names}  # fmt: skip
    queries = {m: {row: torch.randn(HEADS * GROUP, n, SIZE),
                   other: torch.randn(HEADS * GROUP, 9, SIZE)} for m in pool.names}  # fmt: skip
    store = torch.tensor([7, 3])  # flat pages 14, 15, 6, 7
    split = {"a": [1, 3], "b": [3, 1]}
    pool.state.record(row, tail_start, store, torch.tensor([split[m] for m in pool.names]))
    kept, homes = {}, {}
    for name in pool.names:
        flat, page = [14, 15, 6, 7], 0
        for head, pages in enumerate(split[name]):
            mine = sorted(torch.randperm(tail_start)[: pages * BLOCK].tolist())
            kept[name, head] = mine
            for index, position in enumerate(mine):
                where = flat[page + index // BLOCK], index % BLOCK
                homes[name, head, position] = where
                key = pool.caches[name].pages.view(-1, 2, BLOCK, SIZE)
                key[where[0], 0, where[1]] = keys[name][row][head, position]
                pool.values.layer(name)[where] = 100.0 + position
            page += pages
    start = tail_start
    for count in chunks:
        spans = {other: (start - 16, start - 16 + count), row: (start, start + count)}
        pool.accumulating = [0, 1]
        pool.step(spans, tables, keys, queries)
        start += count
    for name in pool.names:
        values = pool.values.layer(name)[..., 0]
        seen = [[*kept[name, head], *range(tail_start, n)] for head in range(HEADS)]
        inputs = queries[name][row], keys[name][row]
        expected = matrix(*inputs, tail_start, n, seen, SINKS[name])
        for head in range(HEADS):
            for position in kept[name, head]:
                got = float(values[homes[name, head, position]]) - 100.0 - position
                assert got == pytest.approx(float(expected[head, position]), abs=1e-4)
            for position in range(tail_start, n):
                page = tables[row][position // BLOCK] * HEADS + head
                got = float(values[page, position % BLOCK])
                assert got == pytest.approx(float(expected[head, position]), abs=1e-4)
        assert bool(values[:HEADS][0].eq(0).all()), "the null block"
