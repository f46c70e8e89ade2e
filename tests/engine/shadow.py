"""A worker without a model: it executes each step on blocks that remember what they hold.

The content of a slot is a number. Under full attention it is a hash of all tokens up to the
slot's, so equal prefixes hold equal content; after an eviction it is one of what was kept, too.
What a store keeps names the life that made it, the number of evictions and the slot. A life is a
request between two (re)admissions. The worker knows only what the scheduler sends: SchedulerOutput
and its plan.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.outputs import KVConnectorOutput

from tests.engine.faulty_disk import tag_of
from tests.engine.offloaded import ShadowOffload
from tests.engine.remote import ShadowRemote
from tests.engine.saving import LOST, ShadowSaving, extend_chain
from vllm_kvevict.config.connectors import SAVING
from vllm_kvevict.rules.step_plan import PLAN, Eviction, ReusedStore, StepPlan, StoreCopy
from vllm_kvevict.stores.files import StoreFiles, unpack
from vllm_kvevict.stores.region import open_region

if TYPE_CHECKING:
    from tests.engine.harness import Setup


def of_store(block_hash: bytes) -> bool:
    """Whether a hash marks a block of a published store, or the last one behind it."""
    return get_block_hash(block_hash).startswith(b"kv_eviction store")


@dataclass
class Saved:
    """A store outside the KV cache.

    ``content`` has of each group what ``ShadowWorker.published`` has, and what stood in its
    blocks; ``generation`` is the checksum of the weights that computed it.
    """

    name: str
    generation: str
    content: list[tuple[Any, ...]]


@dataclass
class Row:
    """One life of a request on the worker."""

    life: tuple[str, int]
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    content: list[int]
    tail_start: list[int] = field(default_factory=list)
    stores: list[list[int]] = field(default_factory=list)
    store_content: list[list[list[int]]] = field(default_factory=list)
    evictions: int = 0
    over: tuple[int, ...] = ()
    """What its stores hold, as one number; empty before any eviction."""
    counted: int = 0
    """Tokens whose queries' attention was added up, from the first on."""
    lost: bool = False
    """Whether it has read a slot that was not loaded. All that it computes from then on is lost."""

    def __post_init__(self) -> None:
        self.tail_start = [0] * len(self.tables)
        self.stores = [[] for _ in self.tables]
        self.store_content = [[] for _ in self.tables]


def both(loads: KVConnectorOutput | None, offload: KVConnectorOutput) -> KVConnectorOutput:
    """Return the combined output of two connectors; the first may be missing."""
    if loads is None:
        return offload
    meta = MultiKVConnectorWorkerMetadata(metadata=(None, offload.kv_connector_worker_meta))
    return replace(
        loads,
        finished_recving=(loads.finished_recving or set()) | (offload.finished_recving or set()),
        kv_connector_worker_meta=meta,
    )


class ShadowWorker:
    """Executes scheduler outputs in order and asserts on everything it reads.

    Args:
        setup: Block size, window and groups.
        sample: The next token of a request, by id and tokens so far.

    """

    def __init__(self, setup: "Setup", sample: Callable[[str, list[int]], int]) -> None:
        self.setup = setup
        self.sample = sample
        self.rows: dict[str, Row] = {}
        self.lives: dict[str, int] = {}
        self.memory: list[list[int | None]] = [
            [None] * setup.block_size for _ in range(setup.blocks)
        ]
        self.rings: dict[tuple[int, int], tuple[tuple[str, int], int]] = {}
        self.used: dict[str, list[set[int]]] = {}
        """Blocks that the last executed step touched, by request and group."""
        self.evictions = 0
        self.published: dict[tuple[int, int], tuple[Any, ...]] = {}
        """Tail start, store, its content and point, and the content of all positions before the
        point, by group and first block of the store."""
        self.host: dict[str, Saved] = {}
        """What host memory holds of stores."""
        self.restored = 0
        self.cannot_load: Callable[[str], bool] = lambda name: False
        """Whether a rank cannot load the store of a name."""
        self.lost: list[str] = []
        """Stores that the last step could not load."""
        self.lately_lost: dict[str, Saved] = {}
        self.files: StoreFiles | None = None
        """Where stores are written to; of their content only names and sizes are real."""
        self.disk: list[Saved] = []
        """What was written to files, by the tag in the file."""
        self.tensors: Callable[[StoreCopy, int], dict[str, torch.Tensor]] = lambda copy, tag: {}
        """Tensors of a store as a file must have them, with a tag."""
        self.generation = ""
        """Checksum of the weights, if they are others than at first."""
        self.weighed = 0
        self.heard: dict[str, dict[int, int]] = {}
        """Content of the positions whose hidden states are kept: position p in slot p % w."""
        self.left: dict[str, tuple[Row, dict[int, int]]] = {}
        """By replay: what the request that it replays had, and was heard of it, at its eviction."""
        self.compared = 0
        self.offload: ShadowOffload | None = None
        if setup.offloads:
            self.offload = ShadowOffload(self.memory, setup.chunk, setup.blocks)
        self.remote: ShadowRemote | ShadowSaving | None = None
        if setup.connector in SAVING:
            self.remote = ShadowSaving(self.memory, setup.block_size, setup.blocks)
        elif setup.connector:
            self.remote = ShadowRemote(self.memory, setup.block_size, setup.blocks)
        self.fenced = True
        """Whether loads wait for the evictions of the step before."""
        self.lags = bool(setup.connector)
        """Whether evictions of a step end only when something waits for them, as on a GPU."""
        self._enqueued: list[Callable[[], None]] = []
        self.transferred: Any = None
        """What the last step reported of copies."""

    def execute(self, output: Any) -> dict[str, list[int]]:
        """Run a step; returns the sampled tokens by request id."""
        if self.fenced:
            self._catch_up()
        loads = stores = output.kv_connector_metadata
        if self.remote is not None and self.offload is not None:
            loads, stores = output.kv_connector_metadata.metadata
            # Before any load is posted.
            self.offload.before(stores)
        if isinstance(self.remote, ShadowSaving):
            self.remote.not_loaded.begin_step(output)
        if self.remote is not None:
            self.remote.begin(loads)
        # The forward pass comes later in the stream than the evictions of the step before.
        self._catch_up()
        self._follow(output)
        plan: StepPlan = getattr(output, PLAN, None) or StepPlan()
        if self.offload is not None and plan.settle_first:
            self.offload.settle(plan.settle_first, stores)
        self.weighed = plan.weigh
        if plan.weigh and self.files is not None:
            self.files.use(self.generation)
        self.lost = []
        for copy in plan.saves_first:
            self._save(copy)
        for copy in plan.loads:
            self._load(copy)
        if self.offload is not None and self.remote is None:
            self.offload.before(stores)
        for source, target in output.kv_cache_block_copies or ():
            self.memory[target] = list(self.memory[source])
        for request_id, reused in plan.reused.items():
            if request_id in self.left:
                self._replay(request_id, reused)
            else:
                self._take(self.rows[request_id], reused)
        spans = {
            request_id: (self.rows[request_id].computed, self.rows[request_id].computed + count)
            for request_id, count in output.num_scheduled_tokens.items()
        }
        self.used = {request_id: [set() for _ in range(self.setup.groups)] for request_id in spans}
        # A layer writes the keys of the whole batch before it attends.
        for request_id, (start, end) in spans.items():
            self._write(self.rows[request_id], start, end)
        if isinstance(self.remote, ShadowSaving) and self.remote.failures:
            self._lose(spans)
        for request_id, (start, end) in spans.items():
            self._read(self.rows[request_id], start, end)
        self._record(plan, spans)
        self._accumulate(plan, spans)
        self.transferred = None
        if isinstance(self.remote, ShadowSaving):
            self.remote.save(loads)
        if self.remote is not None:
            self.transferred = self.remote.after()
        if self.offload is not None:
            self.transferred = both(self.transferred, self.offload.after(stores))
            self.offload.settle(plan.settle)
        for eviction in plan.evictions:
            self._evict(eviction, spans)
        self._hear(plan, spans)
        for name in plan.forgotten:
            self.host.pop(name, None)
        for copy in plan.saves:
            self._save(copy)
        sampled = {}
        for request_id, (_, end) in spans.items():
            row = self.rows[request_id]
            row.computed = end
            assert end <= len(row.tokens), f"{request_id} computes a token it does not have"
            sampled[request_id] = []
            if end == len(row.tokens):
                sampled[request_id] = [self.sample(request_id, row.tokens)]
                row.tokens.append(sampled[request_id][0])
        return sampled

    def _catch_up(self) -> None:
        """Run what is in the stream."""
        enqueued, self._enqueued = self._enqueued, []
        for kernel in enqueued:
            kernel()

    def _follow(self, output: Any) -> None:
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self.heard.pop(request_id, None)
            self.left.pop(request_id, None)
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._admit(new.req_id, new.prompt_token_ids, new.num_computed_tokens, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._admit(request_id, cached.all_token_ids[request_id], computed, blocks)
                continue
            row = self.rows[request_id]
            assert row.computed == computed, f"{request_id} is at {row.computed}, not {computed}"
            for table, more in zip(row.tables, blocks or (), strict=bool(blocks)):
                table.extend(more)

    def _admit(self, request_id: str, tokens: list[int], computed: int, blocks: Any) -> None:
        self.lives[request_id] = self.lives.get(request_id, 0) + 1
        chain: list[int] = []
        extend_chain(chain, tokens[:computed])
        self.rows[request_id] = Row(
            (request_id, self.lives[request_id]),
            list(tokens),
            computed,
            [list(table) for table in blocks],
            chain,
        )

    def _take(self, row: Row, taken: list[ReusedStore]) -> None:
        """Start from what another request's eviction left. What it writes now is its own."""
        assert taken and not row.evictions
        row.evictions, point, before = 1, 0, []
        for one in taken:
            tail_start, store, content, *at = self.published[one.group_id, one.store[0]]
            assert (one.tail_start, one.store) == (tail_start, store)
            row.tail_start[one.group_id], row.stores[one.group_id] = tail_start, store
            row.store_content[one.group_id] = content
            if at[0] > point:
                # The last of the groups to evict knows what was computed before.
                point, before = at
        row.over = (hash(repr(row.store_content)),)
        row.content[:] = before
        extend_chain(row.content, row.tokens[point : row.computed], *row.over)

    def _replay(self, request_id: str, taken: list[ReusedStore]) -> None:
        """Start from what the eviction of another request left it."""
        row, (of, _) = self.rows[request_id], self.left[request_id]
        groups = {one.group_id: one for one in taken}
        for group, store in enumerate(of.stores):
            assert bool(store) == (group in groups)
            if store:
                one = groups[group]
                assert (one.tail_start, one.store) == (of.tail_start[group], store)
        row.tail_start, row.stores = list(of.tail_start), list(of.stores)
        row.store_content, row.over = list(of.store_content), of.over
        row.content[:] = of.content[: row.computed]

    def _hear(self, plan: StepPlan, spans: dict[str, tuple[int, int]]) -> None:
        """Keep hidden states; a replay finds those of the positions that it computes."""
        window = self.setup.window
        for request_id, heard in plan.hidden_states.items():
            start, end = spans[request_id]
            assert heard.start == start and heard.end == end and start <= heard.first < end
            assert end - heard.first <= window
            kept = self.heard.setdefault(request_id, {})
            for position in range(heard.first, end):
                kept[position % window] = self.rows[request_id].content[position]
        for request_id in plan.dropped:
            del self.left[request_id]
        for replay in plan.replays:
            of = self.rows[replay.of]
            kept = self.heard.pop(replay.of)
            for position in range(replay.start, replay.end):
                assert kept.get(position % window) == of.content[position], "was not heard"
            assert max(of.tail_start) <= replay.start
            self.left[replay.request_id] = deepcopy(of), kept
        for replay in plan.compared:
            of, _ = self.left.pop(replay.request_id)
            kept, row = self.heard.pop(replay.request_id), self.rows[replay.request_id]
            assert row.tokens[: replay.end] == of.tokens[: replay.end]
            for position in range(replay.start, replay.end):
                assert kept.get(position % window) == row.content[position], "was not replayed"
            self.compared += 1

    def _save(self, copy: StoreCopy) -> None:
        assert copy.keep or copy.write
        content = [
            (
                self.published[one.group_id, one.store[0]] if one.store else None,
                [list(self.memory[block]) for block in one.blocks],
            )
            for one in copy.groups
        ]
        saved = Saved(copy.name, self.generation, content)
        if copy.keep:
            self.host[copy.name] = saved
        if copy.write and self.files is not None:
            tensors = self.tensors(copy, len(self.disk))
            self.disk.append(saved)
            self.files.write_soon(copy.name, 0, tensors, lambda: None)

    def _load(self, copy: StoreCopy) -> None:
        self.restored += 1
        saved = self.host.get(copy.name)
        if saved is None and copy.payload is None and copy.name in self.lately_lost:
            # It was planned before the scheduler heard of it.
            saved = self.lately_lost[copy.name]
            self.lost.append(copy.name)
        if saved is None:
            assert copy.payload is not None, "no memory holds it"
            mapping = open_region(copy.payload[0])
            assert mapping is not None, "its memory is gone"
            saved = self.disk[tag_of(unpack(mapping))]
            if copy.keep:
                self.host[copy.name] = saved
        assert saved.name == copy.name, "it is another store"
        assert saved.generation == self.generation, "other weights computed it"
        for one, (published, memory) in zip(copy.groups, saved.content, strict=True):
            if published is not None:
                tail_start, store, *more = published
                assert len(one.store) == len(store)
                self.published[one.group_id, one.store[0]] = tail_start, one.store, *more
            for block, slots in zip(one.blocks, memory, strict=True):
                self.memory[block] = list(slots)
        # What a request reads after that is not real: its output must be dropped.
        if self.files is not None and self.cannot_load(copy.name):
            self.lost.append(copy.name)
            self.host.pop(copy.name, None)
            self.lately_lost[copy.name] = saved

    def _write(self, row: Row, start: int, end: int) -> None:
        extend_chain(row.content, row.tokens[start:end], *row.over)
        if row.lost:
            row.content[start:end] = [LOST] * (end - start)
        bs = self.setup.block_size
        for group, table in enumerate(row.tables):
            for position in range(start, end):
                block = table[position // bs]
                assert block, f"{row.life} writes position {position} to the null block"
                if len(self.memory[block]) != bs:  # It was a page of a store.
                    self.memory[block] = [None] * bs
                self.memory[block][position % bs] = row.content[position]
                self.used[row.life[0]][group].add(block)

    def _lose(self, spans: dict[str, tuple[int, int]]) -> None:
        """Mark the requests that read a lost slot, also one that another of them has computed."""
        found = True
        while found:
            found = False
            for request_id, (start, end) in spans.items():
                row = self.rows[request_id]
                if not row.lost and any(LOST in slots for slots in self._attended(row, end)):
                    found = row.lost = True
                    self._spoil(row, start, end)

    def _attended(self, row: Row, end: int) -> Iterator[list[int | None]]:
        """The slots that the queries before ``end`` attend to, by block."""
        size = self.setup.block_size
        for table, first in zip(row.tables, row.tail_start, strict=True):
            for position in range(first, end, size):
                yield self.memory[table[position // size]][: end - position]
        for store in row.stores:
            yield from (self.memory[block] for block in store)

    def _spoil(self, row: Row, start: int, end: int) -> None:
        row.content[start:end] = [LOST] * (end - start)
        for table in row.tables:
            for position in range(start, end):
                block, slot = divmod(position, self.setup.block_size)
                self.memory[table[block]][slot] = LOST

    def _read(self, row: Row, start: int, end: int) -> None:
        """Everything that the queries of [start, end) attend to is what it should be."""
        window = self.setup.sliding_window
        for group, table in enumerate(row.tables):
            first = row.tail_start[group]
            if window is not None and group == self.setup.groups - 1:
                first = self.setup.first_read(start)
            self._expect_positions(row, group, table, first, end)
            self._expect_store(row, group)

    def _expect_positions(
        self, row: Row, group: int, table: list[int], first: int, end: int
    ) -> None:
        bs, used = self.setup.block_size, self.used[row.life[0]][group]
        for index in range(first // bs, -(-end // bs)):
            block = table[index]
            low, high = max(first - index * bs, 0), min(end - index * bs, bs)
            expected = row.content[index * bs + low : index * bs + high]
            assert row.lost or self.memory[block][low:high] == expected, (
                f"{row.life} reads block {block} for positions from {index * bs}, "
                f"group {group}: overwritten or never computed"
            )
            used.add(block)

    def _expect_store(self, row: Row, group: int) -> None:
        for block, expected in zip(row.stores[group], row.store_content[group], strict=True):
            assert row.lost or self.memory[block] == expected, (
                f"{row.life} reads store block {block}, group {group}: overwritten"
            )
            self.used[row.life[0]][group].add(block)

    def _record(self, plan: StepPlan, spans: dict[str, tuple[int, int]]) -> None:
        slots = list(plan.rings.values())
        assert len(set(slots)) == len(slots), f"ring slot used twice in a step: {plan.rings}"
        window = self.setup.window
        for request_id, slot in plan.rings.items():
            assert 0 <= slot < self.setup.ring_count
            start, end = spans[request_id]
            for position in range(max(start, end - window), end):
                self.rings[slot, position % window] = (self.rows[request_id].life, position)

    def _accumulate(self, plan: StepPlan, spans: dict[str, tuple[int, int]]) -> None:
        assert len(set(plan.accumulating)) == len(plan.accumulating)
        for request_id in plan.accumulating:
            row, (start, end) = self.rows[request_id], spans[request_id]
            assert row.counted == start, f"{row.life}: query {row.counted} was never counted"
            row.counted = end

    def _evict(self, eviction: Eviction, spans: dict[str, tuple[int, int]]) -> None:
        row, n = self.rows[eviction.request_id], eviction.num_tokens
        window = self.setup.window
        assert spans[eviction.request_id][1] == n
        needs_window = self.setup.needs_window and eviction.policy not in ("streaming-llm", "h2o")
        assert (eviction.ring is not None) == needs_window, "evicts without its window"
        if eviction.policy == "h2o":
            assert row.counted == n, f"{row.life}: {row.counted} of {n} queries were counted"
        if eviction.ring is not None:
            for p in range(n - window, n):
                recorded = self.rings.get((eviction.ring, p % window))
                assert recorded == (row.life, p), f"{row.life}: query {p} is not in the ring"
        if self.lags and not any(part.published for part in eviction.groups):
            self._enqueued.append(lambda: self._move(row, eviction))
        else:
            self._move(row, eviction)
        self.evictions += 1

    def _move(self, row: Row, eviction: Eviction) -> None:
        """Read the candidates of an eviction, and write its survivors."""
        n, bs, window = eviction.num_tokens, self.setup.block_size, self.setup.window
        row.evictions += 1
        for part in eviction.groups:
            group = part.group_id
            assert part.tail_start == (n - window) // bs * bs
            assert part.old_tail_start == row.tail_start[group] < part.tail_start
            assert part.old_store == row.stores[group]
            first = part.old_tail_start
            assert part.positional == row.tables[group][first // bs : -(-n // bs)]
            self._expect_positions(row, group, row.tables[group], first, n)
            self._expect_store(row, group)
            content = [
                [
                    hash((*row.life, "store", row.evictions, group, index, slot))
                    for slot in range(self.setup.page)
                ]
                for index in range(len(part.store))
            ]
            if row.lost:
                content = [[LOST] * self.setup.page for _ in part.store]
            for block, slots in zip(part.store, content, strict=True):
                assert block
                self.memory[block] = list(slots)
                self.used[eviction.request_id][group].add(block)
            row.tail_start[group], row.stores[group] = part.tail_start, part.store
            row.store_content[group] = content
            if part.published:
                left = part.tail_start, part.store, content, n, row.content[:n]
                self.published[group, part.store[0]] = left
        row.over = (hash(repr(row.store_content)),)
