"""Published stores that come back from host memory or from files when the KV cache lost them."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic, time

from vllm.logger import init_logger

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.schedule.step_plan import GroupEviction, StepPlan, StoreBlocks, StoreCopy
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.settings.handover import hands_over, takes_over
from vllm_kvevict.stores.files import StoreFiles, unpack
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.shape import GroupShape, StoreSizes, group_shapes

logger = init_logger("vllm.kv_eviction.tiers")

MOST_READ = 8
"""Files that are read at once, or were read and wait for their request."""

MOST_ABSENT = 4096
"""Stores that were looked for in files and are not there, at most so many are remembered."""

PATIENCE = 10.0
"""Seconds after which a file is looked for again, and what was read and not taken may go."""

HANDOVER_S = 5.0
"""Seconds for which a request that takes a prompt over looks for its file, which may be late."""

LOOK_AGAIN_S = 0.02
"""Seconds between two looks then."""

Payload = list[bytes]


class TieredStores(PublishedStores):
    """Copies every store out of the KV cache when it is published, and back when it is asked for.

    The workers' host memory holds what this says, so there is nothing to be reported: it is asked
    for and counted here, least recently used first out. Files are read and checked here, in a
    thread, and go to the workers with the plan of the step that needs them; their request waits
    meanwhile, all others do not. What cannot be brought back is computed.

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
        self._pool = core.cache.block_pool
        self._counters = core.counters
        self._sizes = sizes
        self._ranks = ranks
        self._memory = memory
        self._files = files
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._next = StepPlan()
        self._reading: dict[str, Future[Payload | None]] = {}
        self._until: dict[str, float] = {}
        self._absent: dict[str, float] = {}
        self._read_seconds: dict[str, float] = {}
        """What reading took, of files that are about to come back."""
        self._reader = ThreadPoolExecutor(2, "kv-eviction-store-reader") if files else None
        self._awaited: set[str] = set()
        """Files that other servers may still write, until the next look for all of them."""
        self._arrived: Future[set[str]] = Future()
        """Those that the last look found."""
        self._arrived.set_result(set())
        self._look_at = 0.0

    def has(self, key: ShareKey) -> bool:
        return super().has(key) or name_of(key) in self._kept or self._read(key) is not None

    def coming(self, state: RequestState) -> bool:
        """Whether a request's store is looked for in files; begins with it."""
        key = state.key
        assert key is not None
        name = name_of(key)
        if name in self._reading:
            # Asked for the result, it forgets what is not there.
            absent = self._read(key) is None
            return absent and (name in self._reading or _on_its_way(state))
        if self._files is None or name in self._kept or self._in_pool(key):
            return False
        now = monotonic()
        assert self._reader is not None
        if now < self._absent.get(name, 0):
            if not _on_its_way(state):
                return False
            if self._is_late(self._files, self._reader, name, now):
                return True
        if len(self._reading) >= MOST_READ and not self._drop_unclaimed(now):
            return True
        read = partial(self._read_files, self._files, name, group_shapes(key, state.rules))
        self._reading[name] = self._reader.submit(read)
        self._until[name] = now + PATIENCE
        return True

    def find(self, state: RequestState) -> PublishedStore | None:
        found, key = super().find(state), state.key
        if found is None and key is not None and self._may_reuse(state):
            return self._restore(state, key)
        if found is not None:
            name = name_of(found.key)
            self._drop_read(name)
            if name in self._kept:
                self._kept.move_to_end(name)
        return found

    def waits(self, state: RequestState) -> bool:
        if state.key is not None and self._may_reuse(state) and self.coming(state):
            return True
        return super().waits(state)

    def publish(
        self, state: RequestState, end: int, evictions: Sequence[GroupEviction]
    ) -> PublishedStore | None:
        store = super().publish(state, end, evictions)
        if store is not None:
            self._save(state, store)
        return store

    def blocks_for(self, state: RequestState) -> int:
        """Blocks that a request takes which begins with its store, where nobody holds that."""
        assert state.key is not None
        rest = state.request.num_tokens + 1 - state.key.point
        return sum(
            shape.blocks + blocks_for(rest, self._managers[group].block_size)
            for group, shape in group_shapes(state.key, state.rules).items()
        )

    def ended(self, state: RequestState) -> bool:
        """As for :class:`PublishedStores`; drops a file that no other waiting request needs."""
        if state.key is not None and (name := name_of(state.key)) in self._reading:
            awaited = any(
                other.key == state.key and not (other.holds_blocks or other.request.is_finished())
                for other in self._table.states.values()
            )
            if not awaited:
                self._drop_read(name)
        store = state.store
        return store is not None and store.written and hands_over(state.request.kv_transfer_params)

    def copy(self, plan: StepPlan) -> None:
        plan.loads, plan.saves, plan.forgotten = (
            self._next.loads,
            self._next.saves,
            self._next.forgotten,
        )
        self._counters.stores_saved += len(plan.saves)
        self._next = StepPlan()

    def reset(self) -> None:
        """Forget all: the prefix cache is reset where the model's weights have changed."""
        self._next.forgotten += self._kept
        self._kept.clear()
        self.kept_bytes = 0
        if self._files is not None:
            logger.warning(
                "KV eviction: the prefix cache was reset, so stores are neither read from files "
                "nor written to them until the server is started again."
            )
        self._files = None
        self._reading.clear()
        self._until.clear()
        self._read_seconds.clear()

    def _save(self, state: RequestState, store: PublishedStore) -> None:
        name, shapes = name_of(store.key), group_shapes(store.key, state.rules)
        write = store.written = self._files is not None and state.request.lora_request is None
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
        if self.blocks_for(state) > self._pool.get_num_free_blocks():
            return None
        shapes = group_shapes(key, state.rules)
        store = self._enter(key, {group: self._take(shape) for group, shape in shapes.items()})
        self._pool.free_blocks([block for block, _ in store.hashes])
        store.written = payload is not None
        num_bytes = self._sizes.num_bytes(shapes) * self._ranks
        seconds = self._read_seconds.get(name, 0.0)
        self._drop_read(name)
        keep = self._keep(name, self._sizes.host_bytes(shapes) * self._ranks)
        self._next.loads.append(_copy(name, store, keep, False, payload))
        self._counters.restored(key.point, num_bytes, from_file=payload is not None)
        if payload is not None:
            self._counters.restoring(seconds, from_file=True)
        return store

    def _take(self, shape: GroupShape) -> PublishedGroup:
        blocks = self._pool.get_new_blocks(shape.blocks)
        store, tail = tuple(blocks[: shape.store]), tuple(blocks[shape.store :])
        return PublishedGroup(shape.tail_start, store, tail)

    def _read(self, key: ShareKey) -> Payload | None:
        """What was read of a store's files, if that is done and they were what they must be."""
        name = name_of(key)
        reading = self._reading.get(name)
        if reading is None or not reading.done():
            return None
        if (payload := reading.result()) is None:
            del self._reading[name], self._until[name]
            self._miss(name)
        return payload

    def _is_late(
        self, files: StoreFiles, reader: ThreadPoolExecutor, name: str, now: float
    ) -> bool:
        """Whether a file is still not there. One look is for all that are waited for."""
        arrived = self._arrived.result() if self._arrived.done() else ()
        if self._arrived.done() and now >= self._look_at:
            self._arrived = reader.submit(files.present, self._awaited, self._ranks)
            self._awaited, self._look_at = set(), now + LOOK_AGAIN_S
        self._awaited.add(name)
        return name not in arrived

    def _drop_unclaimed(self, now: float) -> bool:
        """Drop a file that is not there, or was read and not taken; False where there is none."""
        for name, reading in self._reading.items():
            if reading.done() and (reading.result() is None or now > self._until[name]):
                if reading.result() is None:
                    self._miss(name)
                self._drop_read(name)
                return True
        return False

    def _drop_read(self, name: str) -> None:
        """Forget a file that is read or was, if there is one: nobody will take it."""
        if (reading := self._reading.pop(name, None)) is not None:
            del self._until[name]
            reading.cancel()
            reading.add_done_callback(lambda _: self._read_seconds.pop(name, None))

    def _miss(self, name: str) -> None:
        """Look for a file again after a while only: another server may have written it."""
        if len(self._absent) >= MOST_ABSENT:
            del self._absent[next(iter(self._absent))]
        self._absent[name] = monotonic() + PATIENCE

    def _read_files(
        self, files: StoreFiles, name: str, shapes: dict[int, GroupShape]
    ) -> Payload | None:
        """All ranks' files of a store, checked; None where one is not what it must be."""
        begun, most, found = monotonic(), self._sizes.num_bytes(shapes), []
        for rank in range(self._ranks):
            try:
                found.append(files.read(name, rank, most))
                self._sizes.check(shapes, unpack(found[-1]))
            except FileNotFoundError:
                return None
            except (ValueError, OSError) as error:
                self._counters.files_refused += 1
                path = files.path(name, rank)
                logger.warning("KV eviction: the store in %s is not used: %s.", path, error)
                files.remove(name, self._ranks)
                return None
        self._read_seconds[name] = monotonic() - begun
        return found


def name_of(key: ShareKey) -> str:
    """What a store is called outside: nothing of its prompt can be read from it."""
    return key.digest.hex()[:40]


def _on_its_way(state: RequestState) -> bool:
    """Whether another server that computed a request's prompt may still write its store."""
    request = state.request
    return takes_over(request.kv_transfer_params) and time() < request.arrival_time + HANDOVER_S


def _copy(
    name: str, store: PublishedStore, keep: bool, write: bool, payload: Payload | None = None
) -> StoreCopy:
    groups = [
        StoreBlocks(group, [b.block_id for b in one.store], [b.block_id for b in one.tail])
        for group, one in store.groups.items()
    ]
    return StoreCopy(name, groups, keep, write, payload)
