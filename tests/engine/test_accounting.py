"""Block accounting under random load: vLLM's real schedulers, every invariant, every step.

``KVEVICT_STEPS`` sets how many scheduler steps to run (default 100000).
"""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.engine.scenarios import SCENARIOS, Scenario, run, streaming_in, under_pressure

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("KVEVICT_STEPS", "100000"))
STEPS_A_SCENARIO = 370

PROFILE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    # Shrinking takes minutes: KVEVICT_SHRINK=1 asks for it.
    phases=[Phase.generate] + ([Phase.shrink] if os.environ.get("KVEVICT_SHRINK") else []),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_no_block_is_lost_shared_or_overwritten() -> None:
    totals: Counter[str] = Counter()

    @settings(PROFILE, max_examples=max(1, STEPS // STEPS_A_SCENARIO))
    @given(SCENARIOS)
    def accounting(scenario: Scenario) -> None:
        run(scenario, totals)

    accounting()
    print(" ".join(f"{name}={value}" for name, value in totals.items()))
    for name in (
        "evictions_prefill",
        "evictions_decode",
        "preemptions",
        "aborts",
        "resets",
        "prefix_hits",
        "prefix_hits_capped",
        "postponed",
        "evictions_at_point",
        "steps_switched_off",
        "blocks_freed",
        "evictions_in_place",
        "put_off",
        "at_a_loss",
        "stores_published",
        "taken",
        "taken_behind",
        "taken_in_use",
        "taken_again",
    ):
        assert totals[name] > 0, f"the load never saw any of {name}"


def test_nor_under_pressure() -> None:
    totals: Counter[str] = Counter()

    @settings(PROFILE, max_examples=max(1, STEPS // STEPS_A_SCENARIO // 2))
    @given(SCENARIOS)
    def accounting(scenario: Scenario) -> None:
        run(under_pressure(scenario), totals)

    accounting()
    print(" ".join(f"{name}={value}" for name, value in totals.items()))
    for name in (
        "evictions_pressure",
        "requests_whole",
        "requests_evicted",
        "preemptions",
        "aborts",
        "resets",
        "prefix_hits",
        "steps_switched_off",
        "skipped_shared",
    ):
        assert totals[name] > 0, f"the load never saw any of {name}"
    always = totals["evictions"] - totals["evictions_pressure"]
    assert always > 0, "no request asked to be evicted at once"


def test_nor_where_prompts_evict_as_they_stream_in() -> None:
    totals: Counter[str] = Counter()

    @settings(PROFILE, max_examples=max(1, STEPS // STEPS_A_SCENARIO // 4))
    @given(SCENARIOS)
    def accounting(scenario: Scenario) -> None:
        run(streaming_in(scenario), totals)

    accounting()
    print(" ".join(f"{name}={value}" for name, value in totals.items()))
    for name in (
        "evictions_inside",
        "evictions_at_point",
        "refused",
        "preemptions",
        "aborts",
        "resets",
        "prefix_hits",
        "prefix_hits_capped",
        "evictions_in_place",
        "put_off",
        "taken",
    ):
        assert totals[name] > 0, f"the load never saw any of {name}"
