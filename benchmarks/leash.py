"""A process group that ends with this process, however this process ends."""

import subprocess

# End of file on stdin: whoever held the other end is gone.
_WATCH = """
read -r line
kill -TERM "-$0"
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "-$0" || exit; done
kill -KILL "-$0"
"""


class Leash:
    """Ends a process group, by force after ten seconds, when this process is gone.

    A context manager ends what it started only where Python unwinds: not at SIGTERM (``timeout``,
    a cancelled job) or SIGKILL. The watcher has a session of its own, so that no signal to this
    process's group reaches it.

    Args:
        group: The process group.

    """

    def __init__(self, group: int) -> None:
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCH, str(group)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def release(self) -> None:
        """Let the group live on, or be forgotten where it has ended. Idempotent."""
        self._watcher.kill()
        self._watcher.wait()
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()
