"""Daemon threads for blocking calls. A process that exits does not wait for them."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs calls in order on a fixed number of daemon threads.

    A call on a file system that hangs may never return. The interpreter joins the threads of
    :mod:`concurrent.futures` when it exits, and would hang as well.

    Args:
        count: Number of threads; they are started with the first call.
        name: Name of the threads.

    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._calls = SimpleQueue()
        self._started = False

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a call.

        Returns:
            The future of its result. A future that is cancelled before its call begins skips it.

        """
        if not self._started:
            self._started = True
            for _ in range(self.count):
                Thread(target=self._run, name=self._name, daemon=True).start()
        future: Future[T] = Future()
        self._calls.put((future, work, args))
        return future

    def _run(self) -> None:
        while True:
            self._call(*self._calls.get())

    def _call(self, future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # A separate method, so that an idle thread holds neither arguments nor results.
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work(*args)
        except BaseException as error:  # The caller sees it.
            future.set_exception(error)
        else:
            future.set_result(result)
