"""Published stores that come back from host memory or from files when the KV cache lost them.

The scheduler's thread never touches a file. Two daemon threads read the files of all ranks of a
store into shared memory, check them, and only then may a request take blocks for the store: a load
cannot fail once blocks are given out, whatever happens to the files afterwards. A step's plan names
the memory, each rank maps its own part, and the memory is released when the step was executed. A
read that takes longer than :data:`PATIENCE` is abandoned and its request computes the prompt; while
both threads hang, no store is looked for in files. Waiting for files therefore never exceeds
:data:`PATIENCE`, and whatever goes wrong with a file costs a prefill and never a token.
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
"""Threads that read files."""

MOST_READ = 8
"""Stores that are read at once, or were read and wait for their request."""

MOST_READ_BYTES = 2**30
"""What these hold of host memory; one alone is read however large it is."""

MOST_ABSENT = 4096
"""Stores that were looked for in files and are not there, at most so many are remembered."""

PATIENCE = 10.0
"""Seconds after which a request no longer waits for a file. A store that was not there is looked
for again after as many, and what was read and not taken may go."""

HANDOVER_S = 5.0
"""Seconds for which a request that takes a prompt over looks for its file, which may be late."""

LOOK_AGAIN_S = 0.02
"""Seconds between two looks then."""

WARN_EVERY_S = 600.0
"""Seconds between two log lines about files that cannot be read."""

Payload = list[Region]


@dataclass(eq=False)
class Lookup:
    """A store that is read from files.

    Args:
        num_bytes: Host memory that it takes.
        until: Time of :func:`time.monotonic` at which nobody waits for it any more.
        abandoned: Set when nobody waits for it any more.
        seconds: How long reading it took.
        future: The content of its files; None if they are not what they must be.

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
        """What was read, if that is done and the files were what they must be."""
        return self.future.result() if self.future.done() else None


class TieredStores(PublishedStores):
    """Copies every store out of the KV cache when it is published, and back when it is asked for.

    The workers' host memory holds what this says, so there is nothing to be reported: it is asked
    for and counted here, least recently used first out. The request of a store that is read from
    files waits meanwhile, all others do not. What cannot be brought back is computed. Stores of
    requests with a LoRA adapter stay in the KV cache alone: an adapter may be replaced under its
    name and path, and only vLLM's prefix cache may answer from the old one then.

    Args:
        core: What the engine works on.
        sizes: Of one rank's part of a store.
        ranks: Of the server.
        memory: Bytes of host memory of all ranks together; 0 for none.
        files: Where stores are in files, or None.

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
        """Stores that are not read before others are taken, and until when they are waited for."""
        self._absent: dict[str, float] = {}
        self._reader = Threads(READERS, "kv-eviction-store-reader")
        self._hanging: list[Future[Payload | None]] = []
        """Reads that nobody waits for and that did not end yet."""
        self._awaited: set[str] = set()
        """Files that other servers may still write, until the next look for all of them."""
        self._arrived: Future[set[str]] = Future()
        """Those that the last look found."""
        self._arrived.set_result(set())
        self._look_at = 0.0
        self._taking_over: dict[str, float] = {}
        """Until when requests of other servers' prompts look for a file, by request id."""
        self._loading: dict[str, Lookup] = {}
        """Memory that plans in flight name, by the store."""
        self._writing: dict[str, tuple[PublishedStore, float]] = {}
        """Stores that are being written, and since when."""
        self._writes_fail = False
        self._resets = 0
        self._weighed = 0
        """Number of the last reset after which the weights are known again."""
        self._warn_at = 0.0

    @property
    def _reads_files(self) -> bool:
        """Whether stores are read from files: not while weights after a reset are unknown."""
        return self._files is not None and self._weighed == self._resets

    def has(self, key: ShareKey) -> bool:
        return super().has(key) or name_of(key) in self._kept or self._read(key) is not None

    def coming(self, state: RequestState) -> bool:
        """Whether a request's store is looked for in files; begins with it."""
        key = state.store_key
        assert key is not None
        name, now = name_of(key), monotonic()
        if (reading := self._reading.get(name)) is not None:
            if reading.done:
                return self._read(key) is None and self._on_its_way(state)
            if now < reading.until:
                return True
            self._warn(f"reading {name} took longer than {PATIENCE:g} seconds")
            self._miss(name)
            return False
        if not self._reads_files or name in self._kept or self._in_pool(key):
            return False
        if now < self._absent.get(name, 0):
            if not self._on_its_way(state):
                return False
            if self._is_late(name, now):
                return True
        until = self._queued.setdefault(name, now + PATIENCE)
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
        found, key = super().find(state), state.store_key
        if found is None and key is not None and self._may_take(state):
            return self._restore(state, key)
        if found is not None:
            name = name_of(found.key)
            self._drop_read(name)
            if name in self._kept:
                self._kept.move_to_end(name)
        return found

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
        """Blocks that a request takes which begins with its store, where nobody holds that."""
        assert state.store_key is not None
        rest = state.request.num_tokens + 1 - state.store_key.point
        return sum(
            shape.blocks + blocks_for(rest, self._managers[group].block_size)
            for group, shape in group_shapes(state.store_key, state.rules).items()
        )

    def ended(self, state: RequestState) -> bool:
        """As for :class:`PublishedStores`; drops a file that no other waiting request needs.

        A store that is being written counts as found, unless the last write failed or this one
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
        return since is None or not (self._writes_fail or monotonic() > since + HANDOVER_S)

    def copy(self, plan: StepPlan) -> None:
        plan.loads, plan.saves = self._next.loads, self._next.saves
        plan.forgotten, plan.weigh = self._next.forgotten, self._next.weigh
        self._counters.stores_saved += len(plan.saves)
        self._next = StepPlan()

    def executed(self, plan: StepPlan | None, news: Sequence[StoreNews]) -> None:
        """Release the memory that the plan of a step names, and take what the workers report."""
        for copy in plan.loads if plan is not None else ():
            if copy.payload is not None:
                self._loading.pop(copy.name, None)
        for one in news:
            self._heard(one)

    def _heard(self, news: StoreNews) -> None:
        """Take what a worker reports about files."""
        for name, written in news.written.items():
            store, _ = self._writing.pop(name, (None, 0.0))
            if store is not None:
                store.written = written
            self._writes_fail = not written
        if self._files is not None and news.weighed == self._resets != self._weighed:
            self._files.use(news.generation)
            self._weighed = news.weighed
            logger.info(
                "KV eviction: after the reset of the prefix cache the weights are %s; files are of "
                "stores of these weights.",
                "others than at start-up" if news.generation else "those of start-up",
            )

    def reset(self) -> None:
        """Forget all, since the model's weights may have changed.

        Workers check their weights in the next step. Files are read again once they answered.
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
        """Whether a request may begin with a store from outside the KV cache."""
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
        """Make room in host memory; False where a store is too large for it."""
        if num_bytes > self._memory:
            return False
        self.kept_bytes += num_bytes - self._kept.get(name, 0)
        self._kept[name] = num_bytes
        self._kept.move_to_end(name)
        # Workers load before they forget.
        self._next.forgotten = [other for other in self._next.forgotten if other != name]
        while self.kept_bytes > self._memory:
            oldest, size = self._kept.popitem(last=False)
            self._forget(oldest)
            self.kept_bytes -= size
        return True

    def _forget(self, name: str) -> None:
        """Let the workers forget a store, also one that the same step would still save."""
        self._next.forgotten.append(name)
        for copy in self._next.saves:
            if copy.name == name:
                copy.keep = False
        self._next.saves = [copy for copy in self._next.saves if copy.keep or copy.write]

    def _restore(self, state: RequestState, key: ShareKey) -> PublishedStore | None:
        """Take blocks for a store that the next step's plan brings back, if there are enough."""
        name = name_of(key)
        payload = None if name in self._kept else self._read(key)
        if name not in self._kept and payload is None:
            return None
        # vLLM does not admit the request if this leaves less than its watermark to those that run.
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
        """What was read of a store's files, if that is done and they were what they must be."""
        name = name_of(key)
        reading = self._reading.get(name)
        if reading is None or not reading.done:
            return None
        if reading.payload is None:
            self._miss(name)
        return reading.payload

    def _on_its_way(self, state: RequestState) -> bool:
        """Whether another server that computed a request's prompt may still write its store."""
        if not takes_over(state.request.kv_transfer_params):
            return False
        now = monotonic()
        return now < self._taking_over.setdefault(state.request_id, now + HANDOVER_S)

    def _is_late(self, name: str, now: float) -> bool:
        """Whether a file is still not there. One look is for all that are waited for."""
        assert self._files is not None
        arrived = self._arrived.result() if self._arrived.done() else ()
        if self._arrived.done() and now >= self._look_at:
            self._arrived = self._reader.submit(self._files.present, self._awaited, self._ranks)
            self._awaited, self._look_at = set(), now + LOOK_AGAIN_S
        self._awaited.add(name)
        return name not in arrived

    def _has_room(self, num_bytes: int, now: float) -> bool:
        """Whether another store may be read; drops those that nobody took."""
        for name, reading in list(self._reading.items()):
            if reading.done and now > reading.until:
                self._drop_read(name)
            elif now > reading.until or (reading.done and reading.payload is None):
                self._miss(name)
        held = sum(one.num_bytes for one in (*self._reading.values(), *self._loading.values()))
        fits = not held or held + num_bytes <= MOST_READ_BYTES
        return fits and len(self._reading) < MOST_READ

    def _all_hang(self) -> bool:
        """Whether every thread hangs in a read that nobody waits for any more."""
        self._hanging = [future for future in self._hanging if not future.done()]
        return len(self._hanging) >= READERS

    def _drop_read(self, name: str) -> None:
        """Forget a file that is read or was, if there is one: nobody will take it."""
        self._queued.pop(name, None)
        if (reading := self._reading.pop(name, None)) is not None:
            reading.abandoned.set()
            if not (reading.future.cancel() or reading.future.done()):
                self._hanging.append(reading.future)

    def _miss(self, name: str) -> None:
        """Look for a file again after a while only: another server may have written it."""
        self._drop_read(name)
        if len(self._absent) >= MOST_ABSENT:
            del self._absent[next(iter(self._absent))]
        self._absent[name] = monotonic() + PATIENCE

    def _read_files(
        self, lookup: Lookup, name: str, shapes: dict[int, GroupShape]
    ) -> Payload | None:
        """All ranks' files of a store, checked; None where one is not what it must be."""
        begun, most, found = monotonic(), self._sizes.num_bytes(shapes), []
        files = self._files
        assert files is not None
        for rank in range(self._ranks):
            try:
                found.append(files.read(name, rank, most, lambda: not lookup.abandoned.is_set()))
                self._sizes.check(shapes, unpack(found[-1].map()))
            except FileNotFoundError:
                return None
            except ValueError as error:
                # After a reset it may be a file of other weights.
                if lookup.abandoned.is_set():
                    return None
                self._counters.files_refused += 1
                path = files.path(name, rank)
                # Not the error itself: a handler that keeps records would keep what was read.
                logger.warning("KV eviction: the store in %s is not used: %s.", path, str(error))
                files.remove(name, self._ranks)
                return None
            except Exception as error:
                # The file system or this process is in trouble: that says nothing of the file.
                if not lookup.abandoned.is_set():
                    self._warn(getattr(error, "strerror", None) or type(error).__name__)
                return None
        lookup.seconds = monotonic() - begun
        return found

    def _warn(self, reason: str) -> None:
        """Log, once in a while, that files cannot be read."""
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARN_EVERY_S
            logger.warning("KV eviction: stores were not read from files: %s.", reason)


def name_of(key: ShareKey) -> str:
    """What a store is called outside: nothing of its prompt can be read from it."""
    return key.digest.hex()[:40]


def _copy(
    name: str,
    store: PublishedStore,
    keep: bool,
    write: bool,
    payload: list[Handle] | None = None,
) -> StoreCopy:
    groups = [
        StoreBlocks(group, [b.block_id for b in one.store], [b.block_id for b in one.tail])
        for group, one in store.groups.items()
    ]
    return StoreCopy(name, groups, keep, write, payload)
