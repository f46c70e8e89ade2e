"""Reads of stores from files, for requests that wait for them.

The scheduler's thread never accesses a file. Two daemon threads read the files of all ranks of a
store into shared memory and check them. A read that takes longer than :data:`READ_TIMEOUT_S` is
abandoned. While both threads hang, no store is looked for in files. A request therefore never waits
for files longer than :data:`READ_TIMEOUT_S`.

Requests do not poll. :meth:`StoreReads.ready` names the stores about which something changed since
the last step, so a step costs the same for any number of requests that wait.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Event
from time import monotonic
from typing import Any

from vllm.logger import init_logger

from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.stores.files import StoreFiles, unpack
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.region import Region
from vllm_kvevict.stores.shape import GroupShape, StoreSizes
from vllm_kvevict.stores.threads import Threads

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
"""Seconds for which a store that another server computed is looked for, because its file may be
late."""

FIRST_SEARCH_S = 0.02
"""Seconds between two searches for late files, and until a late file is looked for again. Each
further search for it waits twice as long, because a client may claim that another server computes a
store that nobody computes."""

MAX_SEARCH_S = 0.32
"""Maximum seconds between two searches for a late file."""

MAX_FILES_SOUGHT = 8
"""Maximum number of stores in one search for late files. It limits the work of a step."""

WARNING_INTERVAL_S = 600.0
"""Seconds between two log lines about files that cannot be read."""

Payload = list[Region]


@dataclass(eq=False)
class Lookup:
    """A store that is read from files, or is in the queue to be read.

    Args:
        key: The key of the store.
        shapes: The shape of the store in every group.
        num_bytes: Bytes of host memory that it takes.
        until: Time of :func:`time.monotonic` at which requests stop waiting for it.
        announced: True if the end of the read was reported.
        abandoned: Set when no request waits for it any longer.
        seconds: Duration of the read.
        future: The content of its files; None if they are missing or invalid.

    """

    key: ShareKey
    shapes: Mapping[int, GroupShape]
    num_bytes: int
    until: float
    announced: bool = False
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


@dataclass(eq=False)
class LateStore:
    """A store whose files another server may still write.

    Args:
        key: The key of the store.
        until: Time at which requests stop waiting for it.
        look_at: Time of the next search.
        interval: Seconds until the search after that.

    """

    key: ShareKey
    until: float
    look_at: float
    interval: float = FIRST_SEARCH_S


@dataclass(frozen=True)
class Absence:
    """A store that was not found in files.

    Args:
        until: Time at which it is looked for again.
        searched: True if it is not waited for, whatever a request claims, because a search for it
            as a late store found nothing.

    """

    until: float
    searched: bool


class StoreReads:
    """Reads stores from files on threads, in the order in which requests ask for them.

    Args:
        sizes: Sizes of one rank's part of a store.
        ranks: Number of ranks of the server.
        files: Files of stores, or None.
        counters: Counters of the engine.

    """

    def __init__(
        self, sizes: StoreSizes, ranks: int, files: StoreFiles | None, counters: Counters
    ) -> None:
        self.files = files
        self.paused = False
        """True while the weights after a reset are unknown. No read begins then."""
        self.threads = Threads(READERS, "kv-eviction-store-reader")
        self.reading: dict[str, Lookup] = {}
        """Stores that are being read, or were read and wait for their request, by name."""
        self.queued: dict[str, Lookup] = {}
        """Stores in the queue to be read."""
        self.loading: dict[str, Lookup] = {}
        """Memory that plans in flight refer to."""
        self.late: dict[str, LateStore] = {}
        self.claims: dict[str, float] = {}
        """Time until which requests that another server computed look for a file, by request id."""
        self.hanging: list[Future[Any]] = []
        """Abandoned reads that have not ended yet."""
        self.search: Future[set[str]] = Future()
        """The last search for late files: those that it found."""
        self.search.set_result(set())
        self._sizes = sizes
        self._ranks = ranks
        self._counters = counters
        self._absent: dict[str, Absence] = {}
        self._searches: list[tuple[float, str]] = []
        """Heap of the times at which late files are looked for."""
        self._searched_at = 0.0
        self._missed: dict[str, set[str]] = {}
        """Names of stores that were not found for a request, by request id. They are not looked for
        again: a request that waits for blocks would lose its place in the queue."""
        self._waiters: dict[str, set[str]] = {}
        """Ids of the requests that wait for a store or may use what was read."""
        self._changed: dict[ShareKey, None] = {}
        self._warn_at = 0.0

    def wait(
        self, key: ShareKey, rules: Mapping[int, EvictionRule], request_id: str, claims: bool
    ) -> bool:
        """Return whether a request should wait for a store; start to look for its files.

        Args:
            key: The key of the store.
            rules: Eviction rules of the request.
            request_id: The request.
            claims: True if the request says that another server has computed its prompt.

        """
        name, now = key.name, monotonic()
        self._progress(now)
        lookup = self.reading.get(name) or self.queued.get(name)
        if lookup is None:
            if self.files is None or self.paused or name in self._missed.get(request_id, ()):
                return False
            absence = self._absent.get(name)
            if absence is not None and now < absence.until:
                waits = claims and self._wait_late(key, request_id, absence, now)
                return waits or self._give_up(request_id, name)
            if self.all_hang():
                self._miss(name)
                return self._give_up(request_id, name)
            shapes = self._sizes.shapes(key, rules)
            num_bytes = self._sizes.num_bytes(shapes) * self._ranks
            lookup = self.queued[name] = Lookup(key, shapes, num_bytes, now + READ_TIMEOUT_S)
            self._start(now)
        self._waiters.setdefault(name, set()).add(request_id)
        # A read that has just ended without content is processed with the next call.
        return lookup.payload is None

    def _give_up(self, request_id: str, name: str) -> bool:
        """Record that a request does not wait for a store any more; return False."""
        self._missed.setdefault(request_id, set()).add(name)
        return False

    def _wait_late(self, key: ShareKey, request_id: str, absence: Absence, now: float) -> bool:
        """Return whether a request waits for files that another server may still write."""
        if absence.searched:
            return False
        until = self.claims.setdefault(request_id, now + HANDOVER_TIMEOUT_S)
        if now >= until:
            return False
        if key.name not in self.late:
            self._look(LateStore(key, until, now))
        self._waiters.setdefault(key.name, set()).add(request_id)
        return True

    def ready(self) -> list[ShareKey]:
        """Return the stores about which something changed since the last call."""
        if self.reading or self.queued or self.late:
            self._progress(monotonic())
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def payload(self, name: str) -> Payload | None:
        """Return the content of a store's files, if it was read and is valid; otherwise None."""
        reading = self.reading.get(name)
        return reading.payload if reading is not None else None

    def load(self, name: str) -> Lookup:
        """Hold the content of a store that was read until :meth:`loaded` is called."""
        self.loading[name] = reading = self.reading.pop(name)
        self._waiters.pop(name, None)
        return reading

    def loaded(self, name: str) -> None:
        """Release the content of a store that was loaded."""
        self.loading.pop(name, None)

    def failed(self, name: str) -> None:
        """Record that a store could not be loaded, so that its files are not read again soon."""
        self._miss(name)

    def written(self, name: str) -> None:
        """Record that a store is being written, so that its files are looked for again."""
        self._absent.pop(name, None)

    def drop(self, name: str) -> None:
        """Stop looking for a store, because no request will use its files."""
        late, queued = self.late.pop(name, None), self.queued.pop(name, None)
        reading = self.reading.pop(name, None)
        self._waiters.pop(name, None)
        for entry in (late, queued, reading):
            if entry is not None:
                self._changed[entry.key] = None
        if reading is not None:
            reading.abandoned.set()
            if not (reading.future.cancel() or reading.future.done()):
                self.hanging.append(reading.future)

    def clear(self) -> None:
        """Stop looking for any store, and forget which ones were missing."""
        for name in [*self.reading, *self.queued, *self.late]:
            self.drop(name)
        self._absent.clear()
        self._missed.clear()

    def request_finished(self, request_id: str, name: str) -> None:
        """Record that a request ends; stop looking for its store if no other request waits."""
        self.claims.pop(request_id, None)
        self._missed.pop(request_id, None)
        waiters = self._waiters.get(name)
        if waiters is not None:
            waiters.discard(request_id)
            if not waiters:
                self.drop(name)

    def _progress(self, now: float) -> None:
        """Process what happened on the threads, and what has waited for too long."""
        for name, reading in list(self.reading.items()):
            if reading.done:
                if reading.payload is None:
                    self._miss(name)
                elif not reading.announced:
                    reading.announced = True
                    self._changed[reading.key] = None
                elif self.queued and now > reading.until:
                    # It was not used in time, and another store needs its room.
                    self.drop(name)
            elif now >= reading.until:
                self._warn(f"reading {name} took longer than {READ_TIMEOUT_S:g} seconds")
                self._miss(name)
        if self.queued:
            self._start(now)
        if self.late:
            self._search(now)

    def _start(self, now: float) -> None:
        """Begin reads, in the order of the queue, while there is room."""
        hang = self.all_hang()
        while self.queued:
            name, lookup = next(iter(self.queued.items()))
            if hang or now >= lookup.until:
                self._miss(name)
            elif self._has_room(lookup.num_bytes):
                del self.queued[name]
                self.reading[name] = lookup
                lookup.future = self.threads.submit(self._read, lookup)
            else:
                return

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether another store may be read."""
        if len(self.reading) >= MAX_STORES_READ:
            return False
        held = sum(lookup.num_bytes for lookup in (*self.reading.values(), *self.loading.values()))
        return not held or held + num_bytes <= MAX_READ_BYTES

    def _look(self, late: LateStore) -> None:
        if not self.late:
            # Only entries of stores that are no longer late are left.
            self._searches.clear()
        self.late[late.key.name] = late
        heappush(self._searches, (late.look_at, late.key.name))

    def _search(self, now: float) -> None:
        """Look for late files on a thread. One search covers all whose time has come."""
        if self.search.done() and (found := self.search.result()):
            for name in found:
                if name in self.late:
                    self._absent.pop(name, None)
                    self.drop(name)
            self.search = Future()
            self.search.set_result(set())
        # The first to be late are the first to be given up.
        while self.late and now >= (first := next(iter(self.late.values()))).until:
            self._miss(first.key.name, searched=True)
        if now < self._searched_at + FIRST_SEARCH_S or not self.search.done():
            return
        due: list[LateStore] = []
        while self._searches and self._searches[0][0] <= now and len(due) < MAX_FILES_SOUGHT:
            look_at, name = heappop(self._searches)
            late = self.late.get(name)
            if late is not None and late.look_at == look_at:
                due.append(late)
        if due and self.files is not None:
            names = [late.key.name for late in due]
            self.search = self.threads.submit(self.files.present, names, self._ranks)
            self._searched_at = now
        for late in due:
            late.look_at = now + late.interval
            late.interval = min(2 * late.interval, MAX_SEARCH_S)
            self._look(late)

    def all_hang(self) -> bool:
        """Return whether every thread hangs, in an abandoned read or in a search."""
        self.hanging = [future for future in self.hanging if not future.done()]
        search = not self.search.done() and monotonic() > self._searched_at + READ_TIMEOUT_S
        return len(self.hanging) + search >= READERS

    def _miss(self, name: str, searched: bool = False) -> None:
        """Look for a file again only after a while, because another server may write it."""
        self.drop(name)
        self._absent.pop(name, None)
        if len(self._absent) >= MAX_ABSENT_STORES:
            del self._absent[next(iter(self._absent))]
        self._absent[name] = Absence(monotonic() + READ_TIMEOUT_S, searched)

    def _read(self, lookup: Lookup) -> Payload | None:
        """Return the checked files of all ranks of a store; None if one is missing or invalid."""
        begun, regions = monotonic(), []
        name, shapes, files = lookup.key.name, lookup.shapes, self.files
        max_bytes = self._sizes.num_bytes(shapes)
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
