"""The log line with the scheduler's totals."""

import time

from vllm.logger import init_logger

from vllm_kvevict.metrics.counters import Counters

logger = init_logger("vllm.kv_eviction.scheduler")

LOG_INTERVAL_S = 10.0


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

    def tick(self) -> None:
        """Write every :data:`LOG_INTERVAL_S`, where it is on this process to do so."""
        if self._periodic:
            now = time.monotonic()
            if now - self._logged[0] >= LOG_INTERVAL_S:
                self._log(now)

    def idle(self) -> None:
        """Write before the last answer goes out.

        With several API servers vLLM kills the engine core at once when it is told to stop, so
        there is no later moment. One line at most for every request that ends.
        """
        if self._counters.evictions or self._counters.postponed:
            self._log(time.monotonic())

    def _log(self, now: float) -> None:
        line = self._counters.line()
        if line != self._logged[1]:
            logger.info("KV eviction: %s", line)
        self._logged = (now, line)
