"""Ends commands at SIGINT and SIGTERM, and every process that they started.

:func:`guard` is for commands and benchmarks. :func:`interruptible` is for code inside a process
that has signal handlers of its own, such as a server that starts.
:class:`Leash` and :func:`end_group` end a process group that somebody started.
"""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

SIGNALS = signal.SIGINT, signal.SIGTERM

KILL_AFTER, END_AFTER = 3.0, 6.0
"""Seconds after the signal at which processes of a command are killed, and the command itself."""

TRACKER = b"multiprocessing.resource_tracker"
"""Removes shared memory and ends by itself when its owner is gone; it ignores SIGTERM."""

# End of file on stdin: whoever held the other end is gone.
_LEASH = """
read -r line
kill -TERM "-$0"
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "-$0" || exit; done
kill -KILL "-$0"
"""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ends what is done.

    Args:
        number: The signal.

    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Guard:
    """The signal that ends this process, once it has come."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._number: int | None = None
        self._alone = threading.Event()
        """Set when no process is left below this one."""
        self._below = _Below()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        for number in SIGNALS:
            # Whoever started this process with nohup, or in the background, wants it ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._unwind)
        # The watcher learns of a signal also while the main thread is in C code.
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _forget(self) -> None:
        """A forked child has its parent's handlers and would write to its parent's pipe."""
        signal.set_wakeup_fd(-1)
        atexit.unregister(self._at_exit)
        for number in SIGNALS:
            if signal.getsignal(number) == self._unwind:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default)

    def _unwind(self, number: int, frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            self._silence()
            raise Interrupted(number)

    def _silence(self) -> None:
        """Threads, finalizers and loggers report the end of what they use with tracebacks."""

        def nothing(*_: Any) -> None:
            pass

        threading.excepthook = sys.unraisablehook = nothing
        # Before the interpreter waits for threads of pools.
        sys.excepthook = lambda *_: self._at_exit()
        logging.disable()

    def _watch(self) -> None:
        number = 0
        while number not in SIGNALS:
            number = os.read(self._reading, 1)[0]
        began = time.monotonic()
        sys.addaudithook(_start_nothing)
        with suppress(OSError):
            os.write(2, b"\nInterrupted.\n")
        self._below.end(KILL_AFTER)
        self._alone.set()
        time.sleep(max(0.0, END_AFTER - (time.monotonic() - began)))
        _end_now(number)

    def _at_exit(self) -> None:
        if self._number is not None:
            self._alone.wait(END_AFTER)
            self._below.end(0)
            _die(self._number)


_guard: _Guard | None = None


def guard() -> None:
    """End this process and all processes below it at SIGINT and SIGTERM. Idempotent.

    For the main thread of a command, before it imports what takes long. The processes get SIGTERM
    at once and SIGKILL after :data:`KILL_AFTER` seconds. The main thread unwinds with
    :class:`Interrupted`, and this process ends after :data:`END_AFTER` seconds at the latest: a
    thread pool waits for its threads, and these for a server. One line is printed and no traceback.
    Later signals change nothing.
    """
    global _guard
    if _guard is None or _guard.owner != os.getpid():
        _guard = _Guard()


def end(number: int) -> NoReturn:
    """End this process by a signal, and all processes below it. For the main thread."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    _Below().end(KILL_AFTER)
    _die(number)


@contextmanager
def interruptible(ends: bool = False) -> Iterator[None]:
    """Raise :class:`Interrupted` in the main thread at SIGINT and SIGTERM, inside the context.

    The former handlers are restored. A signal without a handler ends the process, as it would have,
    but after the context has unwound. Handlers of a program that uses this package as a library
    stay and are called, unless the caller ends the process.

    Args:
        ends: True if the caller ends this process then. It ends after :data:`END_AFTER` seconds at
            the latest: unwinding may wait for a pool of threads, such as those of a download. An
            event loop's handler, which only notes a signal until the loop runs again, is replaced.

    """
    mine = threading.current_thread() is threading.main_thread()
    former = {number: signal.getsignal(number) for number in SIGNALS if mine}
    if not ends:
        default = signal.SIG_DFL, signal.default_int_handler
        former = {number: handler for number, handler in former.items() if handler in default}
    # A handler that was not set from Python could not be restored.
    former = {number: handler for number, handler in former.items() if handler is not None}

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        if ends:
            late = threading.Timer(END_AFTER, _end_now, (number,))
            late.daemon = True
            late.start()
        raise Interrupted(number)

    for number, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, unwind)
    try:
        yield
    except Interrupted as error:
        _restore(former)
        if former.get(signal.Signals(error.number)) is signal.SIG_DFL:
            signal.raise_signal(error.number)
        raise
    finally:
        _restore(former)


def _end_now(number: int) -> NoReturn:
    _Below().end(0)
    os._exit(128 + number)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Leash:
    """Ends a process group, by force after ten seconds, when this process is gone.

    A context manager ends what it started only where Python unwinds, which is not the case at
    SIGKILL. The watcher has a session of its own, so that no signal to this process's group
    reaches it.

    Args:
        group: The process group.

    """

    def __init__(self, group: int) -> None:
        self._watcher = subprocess.Popen(
            ["sh", "-c", _LEASH, str(group)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the group live on, or be forgotten where it has ended. Idempotent."""
        self._watcher.kill()
        self._watcher.wait()
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()


def end_group(leader: "subprocess.Popen[Any]", patience: float) -> None:
    """End a process group and wait for it: SIGTERM to its leader, SIGKILL to what is left.

    Args:
        leader: The process that leads the group.
        patience: Seconds between the two; without any, there is no SIGTERM.

    """
    if patience and leader.poll() is None:
        leader.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience
    while runs(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    if runs(leader.pid):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def runs(group: int) -> bool:
    """Return whether any process of a group runs."""
    return any(process.group == group for process in _running())


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    session: int
    started: int


def _running() -> Iterator[_Process]:
    """All processes but zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name, in parentheses, may hold spaces.
            state, *rest = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                parent, group, session = map(int, rest[:3])
                yield _Process(int(stat.parent.name), parent, group, session, int(rest[18]))


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


class _Below:
    """The processes below this one: those that descend from it, and those of their sessions.

    A process whose parent has ended is nobody's descendant any more, but keeps its session.
    """

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()
        """Process ids and start times."""
        self._sessions: set[int] = set()

    def end(self, patience: float) -> None:
        """Send SIGTERM to all, and SIGKILL to what is left after ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while left := self._left():
            late = time.monotonic() > deadline
            if time.monotonic() > deadline + 1:
                # In an uninterruptible call, or another user's.
                return
            for one in left:
                if late:
                    _send(one.pid, signal.SIGKILL)
                elif (one.pid, one.started) not in self._told:
                    _send(one.pid, signal.SIGTERM)
                self._told.add((one.pid, one.started))
            time.sleep(0.1)

    def _left(self) -> list[_Process]:
        running, mine = list(_running()), os.getpid()
        found = {one.pid for one in running if (one.pid, one.started) in self._told}
        parents = found | {mine}
        while more := {one.pid for one in running if one.parent in parents} - found - {mine}:
            found |= more
            parents = more
        self._sessions |= {one.session for one in running if one.pid in found} - {os.getsid(0)}
        left = [one for one in running if one.pid in found or one.session in self._sessions]
        return [one for one in left if not _is_tracker(one.pid)]


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _start_nothing(event: str, args: Any) -> None:
    """Threads that are starting servers must not start more. The main thread may clean up."""
    if event == "subprocess.Popen" and threading.current_thread() is not threading.main_thread():
        # A thread that ends in this way prints no traceback.
        raise SystemExit("interrupted")


def _die(number: int) -> NoReturn:
    """End this process by a signal, so that a shell's loop ends as well."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Process 1 of a container has no default action.
    os._exit(128 + number)
