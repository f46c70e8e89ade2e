"""Programs of a launch side by side in Triton's interpreter, which runs one after another.

Each is a thread, and one runs at a time. Before every load, store and atomic another may take its
turn, drawn at random.
"""

import inspect
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter

TOUCHES = ("create_atomic_rmw", "create_masked_store", "create_masked_load")
SHARE = 0.3
"""Of the turns that are passed on."""


class RingQueue:
    """Whose turn it is among the programs of a launch."""

    def __init__(self, seed: int) -> None:
        self.rand = random.Random(seed)
        self.passed = 0
        self._gates: dict[tuple[int, int, int], threading.Semaphore] = {}
        self._errors: list[BaseException] = []
        self._done = threading.Semaphore(0)
        self._mine = threading.local()

    def run(self, programs: list[tuple[int, int, int]], call: Any) -> None:
        self._gates = {index: threading.Semaphore(0) for index in programs}
        threads = [threading.Thread(target=self._program, args=(one, call)) for one in programs]
        for thread in threads:
            thread.start()
        self._next()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _program(self, index: tuple[int, int, int], call: Any) -> None:
        self._mine.index = index
        self._await(index, self._gates[index])
        try:
            call()
        except BaseException as error:
            self._errors.append(error)
        del self._gates[index]
        self._next()

    def _next(self) -> None:
        if self._gates:
            self.rand.choice(list(self._gates.values())).release()
        else:
            self._done.release()

    def _await(self, index: tuple[int, int, int], gate: threading.Semaphore) -> None:
        gate.acquire()
        interpreter.interpreter_builder.set_grid_idx(*index)

    def touch(self) -> None:
        index = getattr(self._mine, "index", None)
        if index is not None and self.rand.random() < SHARE:
            self.passed += 1
            gate = self._gates[index]
            self._next()
            self._await(index, gate)


@contextmanager
def interleaved(monkeypatch: Any, seed: int) -> Iterator[RingQueue]:
    """Launches inside run their programs side by side."""
    turns, builder = RingQueue(seed), interpreter.interpreter_builder

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        known = inspect.getfullargspec(self.fn).args
        options = {name: value for name, value in options.items() if name in known}
        scope = interpreter._patch_lang(self.fn)
        try:
            args = inspect.getcallargs(self.fn, *arguments, **options)
            for name in args.keys() - set(self.constexprs):
                args[name] = interpreter._implicit_cvt(args[name])
            x, y, z = (*self.grid, 1, 1)[:3]
            builder.set_grid_dim(x, y, z)
            programs = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
            turns.run(programs, lambda: self.fn(**args))
        finally:
            scope.restore()

    def touching(run: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            turns.touch()
            return run(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(interpreter.GridExecutor, "__call__", launch)
        for name in TOUCHES:
            patched.setattr(builder, name, touching(getattr(builder, name)))
        yield turns
