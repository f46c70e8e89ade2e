"""Which positions each KV head still holds: eviction records, composed. Pure numpy.

An eviction keeps columns of what a head held before it: its former store, then the tail
between the old and the new tail start. Composing the records of a request in order turns
columns into positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm_kvevict.rules.step_plan import Eviction
    from vllm_kvevict.worker.eviction import EvictionRecord

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """A KV-cache group: layers that share a block table. ``layers`` are the model's indices."""

    layers: tuple[int, ...]
    num_heads: int
    block_size: int


@dataclass(frozen=True)
class Layer:
    """Tokens of one layer: ``heads[h]`` are the ascending positions in KV head h's store.

    They fill ``pages[h]`` pages. Every head also holds all positions from ``tail_start`` on; 0
    means nothing was evicted.
    """

    index: int
    tail_start: int
    heads: tuple[Positions, ...]
    pages: tuple[int, ...]

    def mask(self, num_tokens: int) -> NDArray[np.bool_]:
        """[H, num_tokens]: whether a head holds a position, store and tail together."""
        held = np.zeros((len(self.heads), num_tokens), dtype=np.bool_)
        for head, positions in enumerate(self.heads):
            held[head, positions] = True
        held[:, self.tail_start :] = True
        return held


@dataclass(frozen=True)
class Snapshot:
    """A request right after an eviction, when ``num_tokens`` tokens were in its cache.

    ``blocks_before`` and ``blocks_after`` count the blocks the request held on both sides of
    the eviction, over all KV-cache groups.
    """

    num_tokens: int
    layers: tuple[Layer, ...]
    blocks_before: int
    blocks_after: int

    @property
    def tail_start(self) -> int:
        """First position that every head of every layer holds."""
        return max(layer.tail_start for layer in self.layers)

    @property
    def num_heads(self) -> int:
        """KV heads of all layers together."""
        return sum(len(layer.heads) for layer in self.layers)

    def counts(self) -> NDArray[np.int64]:
        """[L, num_tokens]: how many KV heads of a layer hold a position."""
        return np.stack([layer.mask(self.num_tokens).sum(0) for layer in self.layers])


def compose(
    former: Sequence[Positions],
    columns: Positions,
    pages: Positions,
    padding: Positions,
    old_tail_start: int,
    tail_start: int,
) -> tuple[Positions, ...]:
    """Positions in the new store of each head of a layer.

    Args:
        former: H arrays: positions in each head's former store; empty ones for none.
        columns: [K]: kept columns, ascending inside a head, the heads one after another.
        pages: [H]: pages each head keeps; K is a multiple of their sum.
        padding: [H]: padding columns in front of a head's candidates.
        old_tail_start: First position of the tail that the eviction saw.
        tail_start: First position after the candidates.

    Returns:
        H ascending arrays.

    Raises:
        ValueError: A column lies outside its head's candidates.

    """
    tail = np.arange(old_tail_start, tail_start, dtype=np.int64)
    ends = np.cumsum(pages * (len(columns) // int(pages.sum())))[:-1]
    kept = []
    for head, mine in enumerate(np.split(columns, ends)):
        candidates = np.concatenate([former[head], tail])
        index = mine - padding[head]
        if len(index) and (index[0] < 0 or index[-1] >= len(candidates)):
            raise ValueError(f"KV head {head} keeps a column outside its candidates")
        kept.append(candidates[index])
    return tuple(kept)


@dataclass(frozen=True)
class _Held:
    """State of a group; its layers in the order of :class:`Group`."""

    store_blocks: int
    tail_start: int
    layers: tuple[Layer, ...]

    def blocks(self, num_tokens: int, block_size: int) -> int:
        return self.store_blocks + blocks_for(num_tokens - self.tail_start, block_size)


class History:
    """Listener of ``WorkerEviction`` that follows one request.

    A request may have several KV-cache groups, which evict together or apart; a snapshot is
    taken of all of them whenever one evicts. A recomputed request starts anew.

    Args:
        groups: Every group that evicts, by vLLM's group id.

    """

    def __init__(self, groups: Mapping[int, Group]) -> None:
        self.snapshots: list[Snapshot] = []
        self._groups = groups
        self._held = self._unevicted()
        self._before: dict[int, _Held] = {}
        self._eviction: Eviction | None = None

    def __call__(self, record: "EvictionRecord") -> None:
        group_id, plan = record.group.group_id, record.group
        if self._held[group_id].store_blocks and not plan.old_store:
            self._held = self._unevicted()
        if record.eviction is self._eviction:
            self.snapshots.pop()
        else:
            self._before, self._eviction = dict(self._held), record.eviction
        held = self._held[group_id]
        columns, pages, padding = (
            tensor.cpu().numpy() for tensor in (record.columns, record.pages, record.padding)
        )
        layers = []
        for row, layer in enumerate(held.layers):
            heads = compose(
                layer.heads, columns[row], pages[row], padding[row],
                plan.old_tail_start, plan.tail_start,
            )  # fmt: skip
            layers.append(Layer(layer.index, plan.tail_start, heads, tuple(pages[row].tolist())))
        self._held[group_id] = _Held(len(plan.store), plan.tail_start, tuple(layers))
        self.snapshots.append(self._snapshot(record.eviction.num_tokens))

    def after_prefill(self, num_prompt_tokens: int) -> Snapshot | None:
        """The state when decode starts; None where nothing was evicted by then."""
        first = [s for s in self.snapshots if s.num_tokens <= num_prompt_tokens]
        return first[-1] if first else None

    def _unevicted(self) -> dict[int, _Held]:
        return {group_id: _unevicted(group) for group_id, group in self._groups.items()}

    def _snapshot(self, num_tokens: int) -> Snapshot:
        before, after = (
            sum(held.blocks(num_tokens, self._groups[g].block_size) for g, held in state.items())
            for state in (self._before, self._held)
        )
        layers = [layer for held in self._held.values() for layer in held.layers]
        layers.sort(key=lambda layer: layer.index)
        return Snapshot(num_tokens, tuple(layers), before, after)


def _unevicted(group: Group) -> _Held:
    heads = (np.empty(0, dtype=np.int64),) * group.num_heads
    pages = (0,) * group.num_heads
    return _Held(0, 0, tuple(Layer(index, 0, heads, pages) for index in group.layers))
