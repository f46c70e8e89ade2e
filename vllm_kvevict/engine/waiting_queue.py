"""The scheduler's queue of waiting requests, without those that wait for a store.

vLLM examines every waiting request in every step as long as the step has tokens left. A request
that waits for a store is examined once and then set aside, and all requests with the same store
return to the queue together. A step therefore costs the same for any number of requests that wait
for one store.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue

from vllm_kvevict.stores.key import ShareKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


class WaitingQueue(RequestQueue):
    """vLLM's queue, and the requests that were set aside.

    The requests that were set aside are counted and can be removed. They are not at the front of
    the queue, and a queue that has no other requests is false.

    Args:
        queue: vLLM's queue.

    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._aside: dict[ShareKey, dict[Request, None]] = {}
        self._examined: dict[Request, ShareKey] = {}
        """Requests that wait for a store and that this step has examined."""

    def examined(self, request: "Request", key: ShareKey) -> None:
        """Record that a request waits for the store of a key. It is still in the queue."""
        self._examined[request] = key

    def set_aside(self) -> None:
        """Set the recorded requests aside, after a step was scheduled."""
        if self._examined:
            self._queue.remove_requests(self._examined.keys())
            for request, key in self._examined.items():
                self._aside.setdefault(key, {})[request] = None
            self._examined.clear()

    def return_unless(self, waits: "Callable[[Request], bool]") -> None:
        """Return the requests whose store is no longer waited for to their places in the queue.

        Args:
            waits: Returns whether a request waits for its store. It is called for one request of
                each store.

        """
        for key, requests in list(self._aside.items()):
            if waits(next(iter(requests))):
                continue
            del self._aside[key]
            if isinstance(self._queue, FCFSRequestQueue):
                ordered = list(merge(self._queue, requests, key=attrgetter("arrival_time")))
                self._queue.clear()
                self._queue.extend(ordered)
            else:
                self._queue.prepend_requests(requests)

    def add_request(self, request: "Request") -> None:
        self._queue.add_request(request)

    def pop_request(self) -> "Request":
        return self._queue.pop_request()

    def peek_request(self) -> "Request":
        return self._queue.peek_request()

    def prepend_request(self, request: "Request") -> None:
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
        for key, requests in self._aside.items():
            if request in requests:
                del requests[request]
                if not requests:
                    del self._aside[key]
                return True
        return False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._aside.values()))

    def __iter__(self) -> "Iterator[Request]":
        yield from self._queue
        for requests in self._aside.values():
            yield from requests
