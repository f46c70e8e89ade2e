"""The log line of totals: a server that pauses again and again writes few of them."""

import pytest

from vllm_kvevict.metrics import totals
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.totals import TotalsLog


class Clock:
    """What :mod:`time` says, where the test says what time it is."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(totals, "time", clock := Clock())
    return clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(totals.logger, "info", lambda form, line: found.append(line))
    return found


def test_pauses_in_a_row_write_one_line_an_interval(clock, lines, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10")
    counters = Counters()
    log = TotalsLog(counters, periodic=False)
    for _ in range(100):
        counters.evictions_decode += 1
        log.tick(idle=False)
        log.tick(idle=True)
        clock.now += 0.25
    said = [int(line.removeprefix("evictions=").split()[0]) for line in lines]
    assert said == [1, 41, 81], "each has all that went before"
    log.close()
    assert lines[-1].startswith("evictions=100 "), "nothing is lost where the server ends"
    log.close()
    assert len(lines) == 4, "nothing is new"


def test_without_a_front_end_that_writes_a_line_comes_with_the_steps(clock, lines):
    counters = Counters()
    log = TotalsLog(counters, periodic=True)
    for _ in range(50):
        counters.evictions_prefill += 1
        log.tick(idle=False)
        clock.now += 1
    assert len(lines) == 5, "vLLM's interval is 10 s by default"
    clock.now += 10
    log.tick(idle=False)
    log.tick(idle=True)
    assert len(lines) == 6 and lines[-1].startswith("evictions=50 ")


@pytest.mark.parametrize("periodic", [True, False])
def test_a_server_that_never_evicted_writes_nothing(clock, lines, periodic):
    counters = Counters(requests_whole=3)
    log = TotalsLog(counters, periodic)
    log.tick(idle=True)
    log.close()
    assert lines == []
    counters.postponed_blocks = 1
    log.tick(idle=True)
    assert len(lines) == 1
