"""Block accounting under random load: vLLM's real schedulers, every invariant, every step.

``KVEVICT_STEPS`` sets how many scheduler steps to run, about. ``KVEVICT_SEED`` draws other days
than those of every run; ``make fuzz`` sets both. The seed that is printed finds a failure again.
"""

import os
from collections import Counter

import pytest

from tests.engine.days import play_until_seen
from tests.engine.scenarios import (
    Scenario,
    conversing,
    in_few_bits,
    in_files,
    run,
    streaming_in,
    under_pressure,
)

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("KVEVICT_STEPS", "12000"))
STEPS_A_SCENARIO = 370
EXAMPLES = max(1, STEPS // STEPS_A_SCENARIO)


def test_no_block_is_lost_shared_or_overwritten() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(scenario, totals)

    names = """
        evictions_prefill evictions_decode preemptions aborts resets
        prefix_hits prefix_hits_capped postponed evictions_at_point steps_switched_off
        blocks_freed evictions_in_place put_off at_a_loss stores_published
        taken taken_behind taken_in_use taken_again stores_saved stores_restored_memory
        tokens_audited audits_dropped
    """.split()
    play_until_seen(accounting, EXAMPLES, totals, names)


def test_nor_under_pressure() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(under_pressure(scenario), totals)

    names = """
        evictions_pressure evictions_at_once requests_whole requests_evicted preemptions aborts
        resets prefix_hits steps_switched_off skipped_shared
    """.split()
    play_until_seen(accounting, max(1, EXAMPLES // 2), totals, names)


def test_nor_where_prompts_evict_as_they_stream_in() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(streaming_in(scenario), totals)

    names = """
        evictions_inside evictions_at_point refused preemptions aborts
        resets prefix_hits prefix_hits_capped evictions_in_place put_off
        taken
    """.split()
    play_until_seen(accounting, max(1, EXAMPLES // 4), totals, names)


def test_nor_where_some_conversations_grow() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(conversing(scenario), totals)

    play_until_seen(accounting, max(1, EXAMPLES // 8), totals, ["stores_published", "taken"])


@pytest.mark.nightly
def test_nor_where_conversations_grow() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(conversing(scenario), totals)

    names = """
        evictions_inside evictions_decode stores_published taken taken_later taken_behind
        taken_in_use taken_again preemptions aborts resets postponed
        stores_saved stores_restored_memory stores_restored_file files_hung weights_changed
    """.split()
    play_until_seen(accounting, EXAMPLES, totals, names)


def test_nor_with_stores_in_files_of_a_disk_that_fails() -> None:
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(in_files(scenario), totals)

    names = """
        stores_published stores_saved stores_restored_file stores_restored_memory files_refused
        files_hung files_failed files_damaged weights_changed handed_over taken taken_behind
        preemptions aborts resets evictions_at_point
    """.split()
    play_until_seen(accounting, max(1, EXAMPLES // 4), totals, names)


def test_nor_with_stores_in_few_bits() -> None:
    """On all of these days. A page of a store holds no whole number of blocks."""
    totals: Counter[str] = Counter()
    days = (lambda day: day), under_pressure, streaming_in, conversing, in_files

    def accounting(scenario: Scenario) -> None:
        run(days[scenario.seed // 7 % 5](in_few_bits(scenario)), totals)

    names = """
        evictions_prefill evictions_decode evictions_pressure evictions_inside evictions_in_place
        evictions_at_point preemptions aborts resets prefix_hits put_off
        stores_published taken taken_behind stores_saved stores_restored_memory
    """.split()
    play_until_seen(accounting, max(1, EXAMPLES // 2), totals, names)
