"""The log line with the scheduler's totals."""

import time

from vllm import envs
from vllm.logger import init_logger

from vllm_kvevict.metrics.counters import Counters

logger = init_logger("vllm.kv_eviction.scheduler")


class TotalsLog:
    """Writes totals that have changed, at most once per interval of vLLM's statistics.

    Changes within an interval are in the next line. A server that often becomes idle therefore does
    not write a line per request, and the last line may be out of date; ``/metrics`` never is.

    Args:
        counters: The totals.
        periodic: True if no front end writes a periodic line.

    """

    def __init__(self, counters: Counters, periodic: bool) -> None:
        self._counters = counters
        self._periodic = periodic
        self._interval_s = envs.VLLM_LOG_STATS_INTERVAL
        self._due = 0.0
        self._line = ""

    def tick(self, idle: bool) -> None:
        """Write a line if one is due; called after a step, and after requests ended between steps.

        If a front end writes periodic lines, a line is written only when no request is left
        (``idle``).
        """
        if (idle or self._periodic) and time.monotonic() >= self._due:
            self.close()

    def close(self) -> None:
        """Write the changes, regardless of when the last line was written."""
        line = self._counters.line()
        if line != self._line and (self._counters.evictions or self._counters.postponed):
            logger.info("KV eviction: %s", line)
            self._line = line
            self._due = time.monotonic() + self._interval_s
