"""Composed records against a paged memory in which the survivors are really moved."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.pages import candidate_grid, compact_index, head_page_table
from vllm_kvevict.rules.step_plan import GroupEviction
from vllm_kvevict.tools.inspect.kept import Group, History, compose
from vllm_kvevict.worker.eviction import EvictionRecord


def at(num_tokens: int) -> Any:
    """An eviction, as far as it matters here."""
    return SimpleNamespace(num_tokens=num_tokens)


@dataclass
class Memory:
    """A KV-cache group whose slots hold positions instead of keys: what is read was kept."""

    layers: int
    heads: int
    block_size: int
    store_blocks: int
    rng: random.Random
    slots: torch.Tensor = field(init=False)
    table: list[int] = field(default_factory=list)
    store: list[int] = field(default_factory=list)
    tail_start: int = 0
    num_tokens: int = 0
    used: int = 0

    def __post_init__(self) -> None:
        self.slots = torch.full((self.layers, 4000, self.block_size), -1)
        self.indptr = torch.zeros(self.layers, self.heads + 1, dtype=torch.int64)

    def take(self, count: int) -> list[int]:
        self.used += count
        assert self.used * self.heads <= 4000
        return list(range(self.used - count, self.used))

    def append(self, count: int) -> None:
        """Write the next ``count`` positions into every head of their positional blocks."""
        for position in range(self.num_tokens, self.num_tokens + count):
            if position % self.block_size == 0:
                self.table += self.take(1)
            page = self.table[position // self.block_size] * self.heads
            self.slots[:, page : page + self.heads, position % self.block_size] = position
        self.num_tokens += count

    def can_evict_to(self, tail_start: int) -> bool:
        return tail_start > (self.tail_start or self.store_blocks * self.block_size)

    def evict(self, tail_start: int, eviction: Any, group_id: int) -> EvictionRecord:
        """Keep random pages and columns; move them; return what the worker would report."""
        bs, old = self.block_size, self.tail_start
        positional = self.table[old // bs :]
        grid, padding = candidate_grid(
            self.indptr, torch.tensor(self.store, dtype=torch.int64), torch.tensor(positional)
        )
        most = grid.shape[-1] - len(positional) + (tail_start - old) // bs
        caps = most - padding
        pages = torch.stack([self._pages(row.tolist()) for row in caps])
        columns = torch.stack(
            [self._columns(*rows, most) for rows in zip(pages, padding, strict=True)]
        )
        store = self.take(self.store_blocks)
        page, slot, target = compact_index(grid, columns, pages, torch.tensor(store), bs)
        for layer in range(self.layers):
            moved = self.slots[layer][page[layer], slot[layer]]
            self.slots[layer][target] = moved.view(-1, bs)
        plan = GroupEviction(group_id, old, tail_start, self.store, positional, store)
        self.indptr[:, 1:] = pages.cumsum(-1)
        self.store, self.tail_start = store, tail_start
        return EvictionRecord(eviction, plan, columns, pages, padding * bs, scores=torch.empty(0))

    def _pages(self, caps: list[int]) -> torch.Tensor:
        pages = [1] * self.heads
        for _ in range((self.store_blocks - 1) * self.heads):
            open_heads = [h for h in range(self.heads) if pages[h] < caps[h]]
            pages[self.rng.choice(open_heads)] += 1
        return torch.tensor(pages)

    def _columns(self, pages: torch.Tensor, padding: torch.Tensor, most: int) -> torch.Tensor:
        bs = self.block_size
        kept: list[int] = []
        for count, pad in zip(pages.tolist(), padding.tolist(), strict=True):
            kept += sorted(self.rng.sample(range(pad * bs, most * bs), count * bs))
        return torch.tensor(kept)

    def read(self) -> list[list[list[int]]]:
        """Positions each head of each layer would attend to, through its page table."""
        table, lengths = head_page_table(
            self.indptr[:, None],
            torch.tensor([self.store or [0]]),
            torch.tensor([self.tail_start]),
            torch.tensor([self.num_tokens]),
            torch.tensor([self.table]),
            self.block_size,
        )
        return [
            [
                self.slots[layer][table[layer, head].long()].flatten()[:length].tolist()
                for head, length in enumerate(lengths[layer].tolist())
            ]
            for layer in range(self.layers)
        ]

    @property
    def blocks(self) -> int:
        return len(self.store) + len(self.table) - self.tail_start // self.block_size


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 4]), st.integers(1, 3)),
        min_size=1,
        max_size=3,
    ),
    growths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_snapshots_are_what_memory_holds(shapes, growths, seed) -> None:
    """Several groups with their own budgets and block sizes, evicting together or apart."""
    rng = random.Random(seed)
    memories = [Memory(*shape, rng=rng) for shape in shapes]
    indices = iter(rng.sample(range(20), sum(m.layers for m in memories)))
    groups = {
        group_id: Group(tuple(next(indices) for _ in range(m.layers)), m.heads, m.block_size)
        for group_id, m in enumerate(memories)
    }
    history, expected = History(groups), 0
    for growth in growths:
        for memory in memories:
            memory.append(growth)
        n = memories[0].num_tokens
        tails = [max(0, n - 1) // m.block_size * m.block_size for m in memories]
        due = [g for g, m in enumerate(memories) if m.can_evict_to(tails[g]) and rng.random() < 0.8]
        before = sum(m.blocks for m in memories)
        eviction = at(n)
        for g in due:
            history(memories[g].evict(tails[g], eviction, g))
        expected += bool(due)
        assert len(history.snapshots) == expected
        if not due:
            continue
        snapshot = history.snapshots[-1]
        assert snapshot.num_tokens == n
        assert (snapshot.blocks_before, snapshot.blocks_after) == (
            before,
            sum(m.blocks for m in memories),
        )
        assert [layer.index for layer in snapshot.layers] == sorted(
            index for group in groups.values() for index in group.layers
        )
        rows = {layer.index: row for row, layer in enumerate(snapshot.layers)}
        counts = snapshot.counts()
        for g, memory in enumerate(memories):
            for index, held in zip(groups[g].layers, memory.read(), strict=True):
                layer = snapshot.layers[rows[index]]
                mask = layer.mask(n)
                assert [row.nonzero()[0].tolist() for row in mask] == [sorted(h) for h in held]
                assert counts[rows[index]].tolist() == [
                    sum(position in head for head in held) for position in range(n)
                ]
                assert [len(h) for h in layer.heads] == [
                    pages * memory.block_size for pages in layer.pages
                ]


def grown(store_blocks: int = 2) -> tuple[Memory, History]:
    memory = Memory(1, 2, 4, store_blocks, random.Random(0))
    memory.append(30)
    return memory, History({0: Group((0,), 2, 4)})


def test_a_recomputed_request_starts_anew() -> None:
    """After a preemption the record has no former store."""
    memory, history = grown()
    history(memory.evict(28, at(30), 0))
    again, _ = grown()
    again.append(6)
    history(again.evict(32, at(36), 0))
    held = again.read()[0]
    mask = history.snapshots[-1].layers[0].mask(36)
    assert [row.nonzero()[0].tolist() for row in mask] == held
    assert history.snapshots[-1].blocks_before == 9


def test_after_prefill() -> None:
    memory, history = grown()
    assert history.after_prefill(30) is None
    history(memory.evict(28, at(30), 0))
    memory.append(8)
    history(memory.evict(36, at(38), 0))
    assert history.after_prefill(29) is None
    assert history.after_prefill(30) is history.snapshots[0]
    assert history.after_prefill(38) is history.snapshots[1]


@pytest.mark.parametrize("column", [1, 10])
def test_a_column_outside_the_candidates_is_an_error(column: int) -> None:
    """Padding or beyond: numpy would wrap or the picture would lie."""
    former = [np.array([3, 5]), np.array([], dtype=np.int64)]
    columns = np.array([0, 2, min(column, 5), max(column, 5)])
    with pytest.raises(ValueError, match="KV head 1"):
        compose(former, columns, np.array([1, 1]), np.array([0, 2]), 8, 12)
    kept = compose(former, np.array([0, 2, 2, 5]), np.array([1, 1]), np.array([0, 2]), 8, 12)
    assert [head.tolist() for head in kept] == [[3, 8], [8, 11]]
