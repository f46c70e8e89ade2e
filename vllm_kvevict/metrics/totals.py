"""The log line with the scheduler's totals."""

import time

from vllm import envs
from vllm.logger import init_logger

from vllm_kvevict.metrics.counters import Counters

logger = init_logger("vllm.kv_eviction.scheduler")


class TotalsLog:
    """Writes totals that have changed, once in an interval of vLLM's statistics at most.

    What changes within an interval is in the next line. So a server that becomes idle again and
    again writes no line a request, and the last one may lag behind; ``/metrics`` never does.

    Args:
        counters: The totals.
        periodic: Whether no front end writes a periodic line.

    """

    def __init__(self, counters: Counters, periodic: bool) -> None:
        self._counters = counters
        self._periodic = periodic
        self._interval_s = envs.VLLM_LOG_STATS_INTERVAL
        self._due = 0.0
        self._line = ""

    def tick(self, idle: bool) -> None:
        """After a step, or what ended requests between steps: write if a line is due.

        Beside a front end that writes periodic lines, only where no request is left (``idle``).
        """
        if (idle or self._periodic) and time.monotonic() >= self._due:
            self.close()

    def close(self) -> None:
        """Write what is new, whenever the last line was."""
        line = self._counters.line()
        if line != self._line and (self._counters.evictions or self._counters.postponed):
            logger.info("KV eviction: %s", line)
            self._line = line
            self._due = time.monotonic() + self._interval_s
