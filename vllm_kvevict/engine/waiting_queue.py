"""The scheduler's queue of waiting requests, without those that wait for a store.

vLLM examines every waiting request in every step as long as the step has tokens left. A request
that waits for a store is examined once and then set aside, and all requests with the same store
return to the queue together when something changed about it. A step therefore costs the same for
any number of requests that wait, and for any number of stores.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue

from vllm_kvevict.stores.key import ShareKey

if TYPE_CHECKING:
    from vllm.v1.request import Request

Group = tuple[ShareKey, bool]
"""Key of the store that requests wait for, and whether they also wait for a late file."""


class WaitingQueue(RequestQueue):
    """vLLM's queue, and the requests that were set aside.

    The requests that were set aside are counted and can be removed. They are not at the front of
    the queue, and a queue that has no other requests is false.

    Args:
        queue: vLLM's queue.

    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._number = count().__next__
        self._places: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """Order in which requests arrived. Their times are those of API servers, whose clocks may
        differ and may be set back."""
        self._aside: dict[Group, dict[Request, None]] = {}
        self._group_of: dict[Request, Group] = {}
        """The group of each request that was set aside."""
        self._examined: dict[Request, Group] = {}
        """Requests that wait for a store and that this step has examined."""

    def arrived(self, request: "Request") -> None:
        """Record that a request arrives, after all requests that arrived before."""
        self._places.setdefault(request, self._number())

    def _place(self, request: "Request") -> int:
        return self._places.get(request, -1)

    def examined(self, request: "Request", key: ShareKey, late: bool) -> None:
        """Record that a request, which is still in the queue, waits for a store.

        Args:
            request: The request.
            key: The key of the store.
            late: True if the request also waits for a file that is late.

        """
        self._examined[request] = key, late

    def set_aside(self) -> None:
        """Set the recorded requests aside, after a step was scheduled."""
        if self._examined:
            self._queue.remove_requests(self._examined.keys())
            for request, group in self._examined.items():
                self._aside.setdefault(group, {})[request] = None
                self._group_of[request] = group
            self._examined.clear()

    def return_ready(
        self, keys: "Iterable[ShareKey]", waits: "Callable[[Request, ShareKey], bool]"
    ) -> "list[Request]":
        """Return the requests whose store is no longer waited for to their places in the queue.

        Args:
            keys: The stores about which something changed.
            waits: Returns whether a request still waits for this store. It is called for one
                request of each group.

        Returns:
            The requests that are in the queue again.

        """
        returned: list[Request] = []
        for group in [(key, late) for key in keys for late in (False, True)]:
            requests = self._aside.get(group)
            if requests is not None and not waits(next(iter(requests)), group[0]):
                del self._aside[group]
                returned += requests
        for request in returned:
            del self._group_of[request]
        if isinstance(self._queue, FCFSRequestQueue):
            self._insert(self._queue, returned)
        elif returned:
            self._queue.prepend_requests(returned)
        return returned

    def _insert(self, queue: "deque[Request]", requests: "list[Request]") -> None:
        """Insert requests into a queue in the order of their arrival.

        The requests that have waited longest are in front, so only the front of the queue moves.
        """
        if not requests:
            return
        requests.sort(key=self._place)
        last, earlier = self._place(requests[-1]), []
        while queue and self._place(queue[0]) <= last:
            earlier.append(queue.popleft())
        queue.extendleft(reversed(list(merge(earlier, requests, key=self._place))))

    @property
    def num_aside(self) -> int:
        """Number of requests that were set aside."""
        return len(self._group_of)

    def add_request(self, request: "Request") -> None:
        self._queue.add_request(request)

    def pop_request(self) -> "Request":
        return self._queue.pop_request()

    def peek_request(self) -> "Request":
        return self._queue.peek_request()

    def prepend_request(self, request: "Request") -> None:
        if self._queue:
            # A replay arrives late, and goes before all others.
            front = self._place(self._queue.peek_request())
            self._places[request] = min(front, self._place(request))
        self._queue.prepend_request(request)

    def prepend_requests(self, requests: "Iterable[Request]") -> None:
        self._queue.prepend_requests(requests)

    def remove_request(self, request: "Request") -> None:
        if not self._remove_aside(request):
            self._queue.remove_request(request)

    def remove_requests(self, requests: "Iterable[Request]") -> None:
        rest = [request for request in requests if not self._remove_aside(request)]
        if rest:
            self._queue.remove_requests(rest)

    def _remove_aside(self, request: "Request") -> bool:
        group = self._group_of.pop(request, None)
        if group is None:
            return False
        del self._aside[group][request]
        if not self._aside[group]:
            del self._aside[group]
        return True

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + self.num_aside

    def __iter__(self) -> "Iterator[Request]":
        yield from self._queue
        yield from self._group_of
