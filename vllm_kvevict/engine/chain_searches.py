"""Searches for the files of the stores that a conversation may continue.

A conversation that returns knows the names of all its stores, but not which of them were written.
One search on a thread covers them all. The scheduler's thread never accesses a file, and a request
waits for its search no longer than :data:`~vllm_kvevict.engine.store_reads.READ_TIMEOUT_S`. A step
does nothing for a search that goes on, or that has ended before.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic

from vllm_kvevict.engine.store_reads import READ_TIMEOUT_S, StoreReads
from vllm_kvevict.stores.files import StoreFiles
from vllm_kvevict.stores.key import ShareKey

NAMES_AT_ONCE = 256
"""Number of stores that a search looks for before it asks whether its time is over. It ends with
the first ones that it finds, since the last store of a conversation continues all before it."""


def _present(files: StoreFiles, keys: Sequence[ShareKey], ranks: int, until: float) -> set[str]:
    """Return the first stores that have files, on the calling thread.

    A long message may come after hundreds of positions at which nothing was written, so all stores
    are looked for, as long as the request waits.
    """
    for first in range(0, len(keys), NAMES_AT_ONCE):
        names = [key.name for key in keys[first : first + NAMES_AT_ONCE]]
        if (present := files.present(names, ranks)) or monotonic() >= until:
            return present
    return set()


@dataclass(eq=False)
class Search:
    """A search for the stores of one request.

    Args:
        keys: The keys of the stores, the last one first.
        until: Time of :func:`time.monotonic` at which its result is no longer waited for, or used.
        future: Names of stores that have files, the last ones of the conversation.
        announced: True if its end was reported.

    """

    keys: Sequence[ShareKey]
    until: float
    future: "Future[set[str]]"
    announced: bool = False

    def over(self, now: float) -> bool:
        return self.future.done() or now >= self.until


class ChainSearches:
    """Searches of the requests that wait.

    Args:
        reads: Reads of stores from files.
        ranks: Number of ranks of the server.

    """

    def __init__(self, reads: StoreReads, ranks: int) -> None:
        self._reads = reads
        self._ranks = ranks
        self._searches: dict[str, Search] = {}
        self._done: deque[Search] = deque()
        """Searches whose threads have ended since the last step. Threads append to it."""
        self._late: deque[Search] = deque()
        """Searches in the order of ``until``, also ended ones until they come to the front."""
        self._changed: dict[ShareKey, None] = {}

    def found(self, request_id: str, keys: Sequence[ShareKey]) -> list[ShareKey] | None:
        """Return those of a request's stores that a search found, the last one first; None while
        they are searched for.

        Args:
            request_id: The request.
            keys: Keys of the stores, at least one, the last one first.

        """
        reads, now = self._reads, monotonic()
        if reads.files is None or reads.paused:
            return []
        search = self._searches.get(request_id)
        if search is None:
            search = self._begin(request_id, keys, now)
        if not search.over(now):
            return None
        if not search.future.done() or search.future.cancelled() or search.future.exception():
            return []
        present = search.future.result()
        return [key for key in search.keys if key.name in present]

    def _begin(self, request_id: str, keys: Sequence[ShareKey], now: float) -> Search:
        """Return the only search of a request until it starts.

        Another one would cost the request its place in the queue, in which those behind it take the
        blocks that it waits for. While all threads hang, the search has found nothing.
        """
        reads, until = self._reads, now + READ_TIMEOUT_S
        assert reads.files is not None
        if reads.all_hang():
            future: Future[set[str]] = Future()
            future.set_result(set())
        else:
            future = reads.threads.submit(_present, reads.files, keys, self._ranks, until)
        search = self._searches[request_id] = Search(keys, until, future)
        self._late.append(search)
        future.add_done_callback(partial(self._ended, search))
        return search

    def first_key(self, request_id: str) -> ShareKey:
        """Return the key that :meth:`ready` returns when the search of a request has ended."""
        return self._searches[request_id].keys[0]

    def ready(self) -> list[ShareKey]:
        """Return the first keys of the searches that have ended since the last call."""
        while self._done:
            self._end(self._done.popleft())
        while self._late and (self._late[0].announced or monotonic() >= self._late[0].until):
            self._end(self._late.popleft())
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def drop(self, request_id: str) -> None:
        """Forget the search of a request that starts or ends."""
        search = self._searches.pop(request_id, None)
        if search is not None:
            self._end(search)

    def clear(self) -> None:
        """Forget all searches, because the files of other weights may be used from now on."""
        for search in self._searches.values():
            self._end(search)
        self._searches.clear()

    def _ended(self, search: Search, _: "Future[set[str]]") -> None:
        self._done.append(search)

    def _end(self, search: Search) -> None:
        """Stop waiting for a search; a thread that is still at it may hang."""
        if search.announced:
            return
        search.announced = True
        self._changed[search.keys[0]] = None
        if not (search.future.cancel() or search.future.done()):
            self._reads.hanging.append(search.future)
