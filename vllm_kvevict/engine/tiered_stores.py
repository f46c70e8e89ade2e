"""Published stores that are restored from host memory or files after the KV cache lost them.

The scheduler's thread never accesses a file. Two daemon threads read the files of all ranks of a
store into shared memory and check them. Only then may a request take blocks for the store, so a
load cannot fail once blocks are assigned, even if the files change later. The plan of a step refers
to the memory, each rank maps its own part, and the memory is released when the step was executed. A
read that takes longer than :data:`READ_TIMEOUT_S` is abandoned, and its request computes the
prompt. While both threads hang, no store is looked for in files. A request therefore never waits
for files longer than :data:`READ_TIMEOUT_S`, and a faulty file costs a prefill but never a wrong
token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from time import monotonic

from vllm.logger import init_logger

from vllm_kvevict.config.handover import hands_over, takes_over
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.stores.files import StoreFiles, unpack
from vllm_kvevict.stores.host import StoreNews
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.region import Handle, Region
from vllm_kvevict.stores.shape import GroupShape, StoreSizes, group_shapes
from vllm_kvevict.stores.threads import Threads
from vllm_kvevict.timeline.rule import blocks_for
from vllm_kvevict.timeline.step_plan import GroupEviction, StepPlan, StoreBlocks, StoreCopy

logger = init_logger("vllm.kv_eviction.tiers")

READERS = 2
"""Number of threads that read files."""

MAX_STORES_READ = 8
"""Maximum number of stores that are being read, or were read and wait for their request."""

MAX_READ_BYTES = 2**30
"""Maximum bytes of host memory of these stores; a single store may be larger."""

MAX_ABSENT_STORES = 4096
"""Maximum number of remembered stores that were not found in files."""

READ_TIMEOUT_S = 10.0
"""Seconds after which a request no longer waits for a file. A missing store is looked for again
after this time, and a store that was read but not used may be discarded."""

HANDOVER_TIMEOUT_S = 5.0
"""Seconds for which a request that was computed by another server looks for its file, which may be
late."""

SEARCH_INTERVAL_S = 0.02
"""Seconds between two such searches."""

WARNING_INTERVAL_S = 600.0
"""Seconds between two log lines about files that cannot be read."""

Payload = list[Region]


@dataclass(eq=False)
class Lookup:
    """A store that is read from files.

    Args:
        num_bytes: Bytes of host memory that it takes.
        until: Time of :func:`time.monotonic` at which requests stop waiting for it.
        abandoned: Set when no request waits for it any longer.
        seconds: Duration of the read.
        future: The content of its files; None if they are missing or invalid.

    """

    num_bytes: int
    until: float
    abandoned: Event = field(default_factory=Event)
    seconds: float = 0.0
    future: Future[Payload | None] = field(default_factory=Future)

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def payload(self) -> Payload | None:
        """The content, if the read is finished and the files are valid; otherwise None."""
        return self.future.result() if self.future.done() else None


class TieredStores(PublishedStores):
    """Copies every store out of the KV cache when it is published, and restores it when it is
    needed.

    The scheduler decides which stores the workers' host memory holds, least recently used first
    out, so the workers report nothing about it. A request waits while its store is read from files;
    all other requests continue. Stores that cannot be restored are computed. Stores of requests
    with a LoRA adapter stay in the KV cache, because an adapter may be replaced under the same name
    and path, and only vLLM's prefix cache may then use the old one.

    Args:
        core: The engine core.
        sizes: Sizes of one rank's part of a store.
        ranks: Number of ranks of the server.
        memory: Bytes of host memory of all ranks together; 0 for none.
        files: Files of stores, or None.

    """

    def __init__(
        self,
        core: EvictionCore,
        sizes: StoreSizes,
        ranks: int,
        memory: int,
        files: StoreFiles | None,
    ) -> None:
        super().__init__(core, enabled=True)
        self._core = core
        self._pool = core.cache.block_pool
        self._counters = core.counters
        self._sizes = sizes
        self._ranks = ranks
        self._memory = memory
        self._files = files
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._next = StepPlan()
        self._reading: dict[str, Lookup] = {}
        self._queued: dict[str, float] = {}
        """Stores in the queue to be read, and the time until which requests wait for them."""
        self._absent: dict[str, float] = {}
        self._reader = Threads(READERS, "kv-eviction-store-reader")
        self._hanging: list[Future[Payload | None]] = []
        """Abandoned reads that have not ended yet."""
        self._awaited: set[str] = set()
        """Files that other servers may still write, for the next search."""
        self._arrived: Future[set[str]] = Future()
        """Files that the last search found."""
        self._arrived.set_result(set())
        self._look_at = 0.0
        self._taking_over: dict[str, float] = {}
        """Time until which requests that another server computed look for a file, by request id."""
        self._loading: dict[str, Lookup] = {}
        """Memory that plans in flight refer to, by the name of the store."""
        self._writing: dict[str, tuple[PublishedStore, float]] = {}
        """Stores that are being written, and the start of the write."""
        self._writes_fail = False
        self._resets = 0
        self._weighed = 0
        """Number of the last reset after which the weights were checked."""
        self._warn_at = 0.0

    @property
    def _reads_files(self) -> bool:
        """True if stores are read from files. They are not while the weights after a reset are
        unknown."""
        return self._files is not None and self._weighed == self._resets

    def has(self, key: ShareKey) -> bool:
        return super().has(key) or name_of(key) in self._kept or self._read(key) is not None

    def coming(self, state: RequestState) -> bool:
        """Return whether a request's store is being looked for in files; start to look for it."""
        key = state.store_key
        assert key is not None
        name, now = name_of(key), monotonic()
        if (reading := self._reading.get(name)) is not None:
            if reading.done:
                return self._read(key) is None and self._on_its_way(state)
            if now < reading.until:
                return True
            self._warn(f"reading {name} took longer than {READ_TIMEOUT_S:g} seconds")
            self._miss(name)
            return False
        if not self._reads_files or name in self._kept or self._in_pool(key):
            return False
        if now < self._absent.get(name, 0):
            if not self._on_its_way(state):
                return False
            if self._is_late(name, now):
                return True
        until = self._queued.setdefault(name, now + READ_TIMEOUT_S)
        if now >= until or self._all_hang():
            self._miss(name)
            return False
        shapes = group_shapes(key, state.rules)
        num_bytes = self._sizes.num_bytes(shapes) * self._ranks
        if self._has_room(num_bytes, now):
            del self._queued[name]
            self._reading[name] = lookup = Lookup(num_bytes, until)
            lookup.future = self._reader.submit(self._read_files, lookup, name, shapes)
        return True

    def find(self, state: RequestState) -> PublishedStore | None:
        store, key = super().find(state), state.store_key
        if store is None and key is not None and self._may_take(state):
            return self._restore(state, key)
        if store is not None:
            name = name_of(store.key)
            self._drop_read(name)
            if name in self._kept:
                self._kept.move_to_end(name)
        return store

    def waits(self, state: RequestState) -> bool:
        if state.store_key is not None and self._may_take(state) and self.coming(state):
            return True
        return super().waits(state)

    def publish(
        self, state: RequestState, end: int, evictions: Sequence[GroupEviction]
    ) -> PublishedStore | None:
        store = super().publish(state, end, evictions)
        if store is not None and state.request.lora_request is None:
            self._save(state, store)
        return store

    def blocks_for(self, state: RequestState) -> int:
        """Return the blocks for a request that starts with its store, if no request holds the
        store."""
        assert state.store_key is not None
        rest = state.request.num_tokens + 1 - state.store_key.point
        return sum(
            shape.blocks + blocks_for(rest, self._managers[group].block_size)
            for group, shape in group_shapes(state.store_key, state.rules).items()
        )

    def ended(self, state: RequestState) -> bool:
        """Record that a request ends, and discard a file that no other waiting request needs.

        A store that is being written counts as available, unless the last write failed or this one
        takes too long.
        """
        self._taking_over.pop(state.request_id, None)
        name = name_of(state.store_key) if state.store_key is not None else ""
        if (name in self._reading or name in self._queued) and not any(
            other.store_key == state.store_key
            and not (other.holds_blocks or other.request.is_finished())
            for other in self._table.states.values()
        ):
            self._drop_read(name)
        store = state.base_store
        if store is None or not store.written or not hands_over(state.request.kv_transfer_params):
            return False
        _, since = self._writing.get(name_of(store.key), (None, None))
        return since is None or not (self._writes_fail or monotonic() > since + HANDOVER_TIMEOUT_S)

    def copy(self, plan: StepPlan) -> None:
        plan.loads, plan.saves = self._next.loads, self._next.saves
        plan.forgotten, plan.weigh = self._next.forgotten, self._next.weigh
        self._counters.stores_saved += len(plan.saves)
        self._next = StepPlan()

    def executed(self, plan: StepPlan | None, news: Sequence[StoreNews]) -> None:
        """Release the memory that the plan of a step refers to, and process the reports of the
        workers."""
        for copy in plan.loads if plan is not None else ():
            if copy.payload is not None:
                self._loading.pop(copy.name, None)
        for report in news:
            self._process(report)

    def _process(self, news: StoreNews) -> None:
        """Process a worker's report about files."""
        for name, written in news.written.items():
            store, _ = self._writing.pop(name, (None, 0.0))
            if store is not None:
                store.written = written
            self._writes_fail = not written
        if self._files is not None and news.weighed == self._resets != self._weighed:
            self._files.use(news.generation)
            self._weighed = news.weighed
            logger.info(
                "KV eviction: after the reset of the prefix cache, the weights are %s; files hold "
                "stores of these weights.",
                "different from those at start-up" if news.generation else "those of start-up",
            )

    def reset(self) -> None:
        """Forget all stores, since the model's weights may have changed.

        Workers check their weights in the next step. Files are read again after their answer.
        """
        self._next.forgotten += self._kept
        self._kept.clear()
        self.kept_bytes = 0
        for name in [*self._reading, *self._queued]:
            self._drop_read(name)
        self._absent.clear()
        if self._files is not None:
            self._resets += 1
            self._next.weigh = self._resets

    def _may_take(self, state: RequestState) -> bool:
        """Return whether a request may start with a store from outside the KV cache."""
        return state.request.lora_request is None and self._may_reuse(state)

    def _save(self, state: RequestState, store: PublishedStore) -> None:
        name, shapes = name_of(store.key), group_shapes(store.key, state.rules)
        write = store.written = self._files is not None
        if write:
            self._writing[name] = store, monotonic()
        self._absent.pop(name, None)
        self._drop_read(name)
        keep = self._keep(name, self._sizes.host_bytes(shapes) * self._ranks)
        if keep or write:
            self._next.saves.append(_copy(name, store, keep, write))

    def _keep(self, name: str, num_bytes: int) -> bool:
        """Make room in host memory; return False if a store is too large for it."""
        if num_bytes > self._memory:
            return False
        self.kept_bytes += num_bytes - self._kept.get(name, 0)
        self._kept[name] = num_bytes
        self._kept.move_to_end(name)
        # Workers load stores before they remove others.
        self._next.forgotten = [other for other in self._next.forgotten if other != name]
        while self.kept_bytes > self._memory:
            oldest, size = self._kept.popitem(last=False)
            self._forget(oldest)
            self.kept_bytes -= size
        return True

    def _forget(self, name: str) -> None:
        """Let the workers remove a store from host memory, even one that the same step would
        save."""
        self._next.forgotten.append(name)
        for copy in self._next.saves:
            if copy.name == name:
                copy.keep = False
        self._next.saves = [copy for copy in self._next.saves if copy.keep or copy.write]

    def _restore(self, state: RequestState, key: ShareKey) -> PublishedStore | None:
        """Take blocks for a store that the next step's plan restores, if there are enough."""
        name = name_of(key)
        payload = None if name in self._kept else self._read(key)
        if name not in self._kept and payload is None:
            return None
        # vLLM does not admit the request if fewer blocks than its watermark remain for running
        # requests.
        reserved = self._core.cache.watermark_blocks if self._core.scheduler.running else 0
        if self.blocks_for(state) + reserved > self._pool.get_num_free_blocks():
            return None
        shapes = group_shapes(key, state.rules)
        store = self._enter(key, {group: self._take(shape) for group, shape in shapes.items()})
        self._pool.free_blocks([block for block, _ in store.hashes])
        store.written = payload is not None
        handles = None
        if payload is not None:
            handles = [region.handle for region in payload]
            self._loading[name] = read = self._reading.pop(name)
            self._counters.restoring(read.seconds, from_file=True)
        self._drop_read(name)
        keep = self._keep(name, self._sizes.host_bytes(shapes) * self._ranks)
        self._next.loads.append(_copy(name, store, keep, False, handles))
        num_bytes = self._sizes.num_bytes(shapes) * self._ranks
        self._counters.restored(key.point, num_bytes, from_file=payload is not None)
        return store

    def _take(self, shape: GroupShape) -> PublishedGroup:
        blocks = self._pool.get_new_blocks(shape.blocks)
        store, tail = tuple(blocks[: shape.store]), tuple(blocks[shape.store :])
        return PublishedGroup(shape.tail_start, store, tail)

    def _read(self, key: ShareKey) -> Payload | None:
        """Return the content of a store's files, if it was read and is valid; otherwise None."""
        name = name_of(key)
        reading = self._reading.get(name)
        if reading is None or not reading.done:
            return None
        if reading.payload is None:
            self._miss(name)
        return reading.payload

    def _on_its_way(self, state: RequestState) -> bool:
        """Return whether another server that computed a request's prompt may still write its
        store."""
        if not takes_over(state.request.kv_transfer_params):
            return False
        now = monotonic()
        return now < self._taking_over.setdefault(state.request_id, now + HANDOVER_TIMEOUT_S)

    def _is_late(self, name: str, now: float) -> bool:
        """Return whether a file is still missing. One search covers all files that are waited
        for."""
        assert self._files is not None
        arrived = self._arrived.result() if self._arrived.done() else ()
        if self._arrived.done() and now >= self._look_at:
            self._arrived = self._reader.submit(self._files.present, self._awaited, self._ranks)
            self._awaited, self._look_at = set(), now + SEARCH_INTERVAL_S
        self._awaited.add(name)
        return name not in arrived

    def _has_room(self, num_bytes: int, now: float) -> bool:
        """Return whether another store may be read; discard stores that were not used in time."""
        for name, reading in list(self._reading.items()):
            if reading.done and now > reading.until:
                self._drop_read(name)
            elif now > reading.until or (reading.done and reading.payload is None):
                self._miss(name)
        held = sum(
            lookup.num_bytes for lookup in (*self._reading.values(), *self._loading.values())
        )
        fits = not held or held + num_bytes <= MAX_READ_BYTES
        return fits and len(self._reading) < MAX_STORES_READ

    def _all_hang(self) -> bool:
        """Return whether every thread hangs, in an abandoned read or in a search."""
        self._hanging = [future for future in self._hanging if not future.done()]
        search = not self._arrived.done() and monotonic() > self._look_at + READ_TIMEOUT_S
        return len(self._hanging) + search >= READERS

    def _drop_read(self, name: str) -> None:
        """Discard the read of a file, if there is one, because no request will use it."""
        self._queued.pop(name, None)
        if (reading := self._reading.pop(name, None)) is not None:
            reading.abandoned.set()
            if not (reading.future.cancel() or reading.future.done()):
                self._hanging.append(reading.future)

    def _miss(self, name: str) -> None:
        """Look for a file again only after a while, because another server may write it."""
        self._drop_read(name)
        if len(self._absent) >= MAX_ABSENT_STORES:
            del self._absent[next(iter(self._absent))]
        self._absent[name] = monotonic() + READ_TIMEOUT_S

    def _read_files(
        self, lookup: Lookup, name: str, shapes: dict[int, GroupShape]
    ) -> Payload | None:
        """Return the checked files of all ranks of a store; None if one is missing or invalid."""
        begun, max_bytes, regions = monotonic(), self._sizes.num_bytes(shapes), []
        files = self._files
        assert files is not None
        for rank in range(self._ranks):
            try:
                region = files.read(name, rank, max_bytes, lambda: not lookup.abandoned.is_set())
                self._sizes.check(shapes, unpack(region.map()))
                regions.append(region)
            except FileNotFoundError:
                return None
            except ValueError as error:
                # After a reset, it may be a file of other weights.
                if lookup.abandoned.is_set():
                    return None
                self._counters.files_refused += 1
                path = files.path(name, rank)
                # The error itself is not logged: a handler that keeps records would keep the
                # content.
                logger.warning("KV eviction: the store in %s is not used: %s.", path, str(error))
                files.remove(name, self._ranks)
                return None
            except Exception as error:
                # The fault is in the file system or this process, not in the file.
                if not lookup.abandoned.is_set():
                    self._warn(getattr(error, "strerror", None) or type(error).__name__)
                return None
        if lookup.abandoned.is_set():
            # The future of an abandoned read is kept, so it must not hold the content.
            return None
        lookup.seconds = monotonic() - begun
        return regions

    def _warn(self, reason: str) -> None:
        """Log that files cannot be read, at most once per interval."""
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARNING_INTERVAL_S
            logger.warning("KV eviction: stores were not read from files: %s.", reason)


def name_of(key: ShareKey) -> str:
    """Return the name of a store outside the KV cache, which reveals nothing about its prompt."""
    return key.digest.hex()[:40]


def _copy(
    name: str,
    store: PublishedStore,
    keep: bool,
    write: bool,
    payload: list[Handle] | None = None,
) -> StoreCopy:
    groups = [
        StoreBlocks(group, [b.block_id for b in part.store], [b.block_id for b in part.tail])
        for group, part in store.groups.items()
    ]
    return StoreCopy(name, groups, keep, write, payload)
