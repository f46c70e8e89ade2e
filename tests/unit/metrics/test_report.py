"""Reports add up to the scheduler's totals, and survive the way vLLM sends its statistics."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.report import TOTALS, Report, Reporter, attach, detach

STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(TOTALS), st.integers(0, 9)),
        st.lists(st.tuples(st.sampled_from(["snapkv", "tova"]), st.booleans()), max_size=3),
        st.lists(st.floats(0.01, 1), max_size=2),
        st.lists(st.floats(0, 1), max_size=2),
        st.integers(-5, 50),
        st.booleans(),
    )
)


@pytest.mark.slow
@given(STEPS)
def test_reports_add_up(steps):
    counters = Counters()
    reporter = Reporter(counters)
    reports, shares, seconds, evictions, saved = [], [], [], [], 0
    for growth, evicted, kept, took, saved_now, taken in steps:
        for name, more in growth.items():
            setattr(counters, name, getattr(counters, name) + more)
        for policy, in_prefill in evicted:
            reporter.evicted(policy, in_prefill)
        for share in kept:
            reporter.kept(share)
        if took:
            reporter.measured(took, [])
        evictions, shares, seconds = evictions + evicted, shares + kept, seconds + took
        if taken and (report := reporter.take(saved := saved_now)) is not None:
            reports.append(report)
    if (report := reporter.take(saved)) is not None:
        reports.append(report)
    for name in TOTALS:
        assert sum(getattr(report, name) for report in reports) == getattr(counters, name)
    for policy in ("snapkv", "tova"):
        for index, in_prefill in enumerate((True, False)):
            sent = sum(report.evictions.get(policy, [0, 0])[index] for report in reports)
            assert sent == evictions.count((policy, in_prefill))
    assert [share for report in reports for share in report.kept_share] == shares
    assert [took for report in reports for took in report.seconds] == seconds
    assert (reports[-1].blocks_saved if reports else 0) == saved


def test_nothing_new_is_not_sent():
    reporter = Reporter(Counters(postponed_ring=7))
    assert reporter.take(0) is None
    reporter.evicted("snapkv", True)
    assert reporter.take(3) is not None
    assert reporter.take(3) is None
    assert asdict(reporter.take(2)) == asdict(Report(blocks_saved=2))
    # Stores that went away with a reset, when nothing else happened.
    assert reporter.take(2, stores=(1, 64)) is not None and reporter.take(2, stores=(1, 64)) is None
    assert asdict(reporter.take(2)) == asdict(Report(blocks_saved=2))


def test_the_way_to_the_front_end():
    report = Report(
        evictions={"snapkv": [1, 2]},
        tokens_evicted=9,
        seconds=[0.25],
        head_spread=[1.5],
        blocks_saved=-3,
    )
    outputs = {0: EngineCoreOutputs(), 3: EngineCoreOutputs(scheduler_stats=SchedulerStats())}
    attach(report, outputs)
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[3]))
    assert detach(received.scheduler_stats) == report
    assert received.scheduler_stats.kv_connector_stats is None, "vLLM's loggers would misread it"
    assert detach(received.scheduler_stats) is None


def test_statistics_of_a_connector_stay():
    stats = SchedulerStats(kv_connector_stats={"transfers": 3})
    assert detach(stats) is None
    assert stats.kv_connector_stats == {"transfers": 3}


def test_a_report_that_cannot_be_sent_is_loud():
    with pytest.raises(RuntimeError, match="no SchedulerStats"):
        attach(Report(), {0: EngineCoreOutputs()})
