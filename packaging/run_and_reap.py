"""Run a command, then end every process it left behind: ``run_and_reap.py COMMAND...``.

A server that outlives the test that started it is adopted by this process (Linux child
subreaper), so exactly the command's own descendants are found, whatever session they are in.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

SIGNALS = signal.SIGINT, signal.SIGTERM

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = float(os.environ.get("REAP_PATIENCE", "10"))
"""Seconds that processes get to end by themselves, and again after SIGTERM."""

KILL_AFTER = 3.0
"""Seconds from SIGTERM to SIGKILL after a signal: ten must be enough for all."""


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, those included that have ended and wait to be reaped."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may hold spaces.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(root: int, patience: float) -> list[int]:
    """Descendants that are still there after ``patience`` seconds, dead children reaped."""
    deadline = time.monotonic() + patience
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        left = descendants(root)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "gone"
    return words[:120]


def end_all(root: int, patience: float) -> None:
    """End what runs below ``root``, SIGKILL ``patience`` seconds after SIGTERM."""
    left = alive(root, 0)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        left = alive(root, patience)
        if not left:
            return


def wait(pid: int) -> int:
    """The command's exit code; adopted processes that end before it are reaped meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def main(command: list[str]) -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")

    patience = KILL_AFTER

    def interrupted(number: int, _frame: object) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in SIGNALS:
        # Whoever started this process with nohup, or in the background, wants it ignored.
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, interrupted)
    try:
        code = wait(os.posix_spawnp(command[0], command, os.environ))
        for pid in alive(os.getpid(), PATIENCE):
            print(f"[reap] left behind: {pid} {name(pid)}", file=sys.stderr)
        patience = PATIENCE
        return code if code >= 0 else 128 - code
    finally:
        end_all(os.getpid(), patience)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
