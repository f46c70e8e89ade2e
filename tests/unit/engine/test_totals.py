"""The log line of totals: complete when nobody is left, and not written at every pause."""

import time

import pytest

from vllm_kvevict.engine import totals
from vllm_kvevict.engine.totals import TotalsLog
from vllm_kvevict.metrics.counters import Counters

PAUSE_S = 0.2


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(totals, "PAUSE_S", PAUSE_S)
    monkeypatch.setattr(totals.logger, "info", lambda form, line: found.append(line))
    return found


def written(lines: list[str], count: int) -> bool:
    """Whether so many lines are there within three seconds."""
    deadline = time.monotonic() + 3
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(lines) == count


def test_pauses_in_a_row_write_one_line(lines):
    counters = Counters()
    log = TotalsLog(counters, periodic=False)
    for _ in range(100):
        counters.evictions_decode += 1
        log.idle()
    assert written(lines, 1)
    assert f"evictions={counters.evictions} " in lines[-1], "complete, a moment later"
    time.sleep(2 * PAUSE_S)
    log.idle()
    assert len(lines) == 1, "nothing is new"
    counters.evictions_decode += 1
    log.idle()
    assert len(lines) == 2, "at once after a while"


def test_a_server_without_evictions_writes_nothing(lines):
    log = TotalsLog(Counters(), periodic=False)
    time.sleep(PAUSE_S)
    log.idle()
    assert not written(lines, 1)
