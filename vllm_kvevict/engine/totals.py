"""The log line with the scheduler's totals."""

import time
from threading import Timer

from vllm.logger import init_logger

from vllm_kvevict.metrics.counters import Counters

logger = init_logger("vllm.kv_eviction.scheduler")

LOG_INTERVAL_S = 10.0
PAUSE_S = 1.0
"""Between two lines of a server that is idle again and again."""


class TotalsLog:
    """Writes totals that have changed since the last line.

    Args:
        counters: The totals.
        periodic: Whether no front end writes a periodic line.

    """

    def __init__(self, counters: Counters, periodic: bool) -> None:
        self._counters = counters
        self._periodic = periodic
        self._logged = (time.monotonic(), "")
        self._later: Timer | None = None

    def tick(self) -> None:
        """Write every :data:`LOG_INTERVAL_S`, where it is on this process to do so."""
        if self._periodic:
            now = time.monotonic()
            if now - self._logged[0] >= LOG_INTERVAL_S:
                self._log(now)

    def idle(self) -> None:
        """Write when nobody is left: at once, or :data:`PAUSE_S` after the line before.

        With several API servers vLLM kills the engine core at once when it is told to stop, so
        there is no later moment for the last line.
        """
        evicting = self._counters.evictions or self._counters.postponed
        if not evicting or self._later is not None or self._counters.line() == self._logged[1]:
            return
        now = time.monotonic()
        wait = self._logged[0] + PAUSE_S - now
        if wait <= 0:
            self._log(now)
        else:
            self._later = Timer(wait, self._log_late)
            self._later.daemon = True
            self._later.start()

    def _log_late(self) -> None:
        self._later = None
        self._log(time.monotonic())

    def _log(self, now: float) -> None:
        line = self._counters.line()
        if line != self._logged[1]:
            logger.info("KV eviction: %s", line)
        self._logged = (now, line)
