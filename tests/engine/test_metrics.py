"""What the scheduler reports, against its blocks and its totals, under random load."""

from collections import Counter
from typing import Any

import pytest

from tests.engine.days import play_until_seen
from tests.engine.expected import replays
from tests.engine.harness import Engine, Setup
from tests.engine.scenarios import Day, Scenario
from tests.engine.views import holdings
from vllm_kvevict.metrics.report import MEASURED, TOTALS, Report, detach
from vllm_kvevict.rules.step_plan import PLAN

SCENARIO_COUNT = 20
"""Some of what must occur, postponed evictions for one, occurs in few scenarios."""


class Metered(Engine):
    """An engine core whose reports are collected, and judged by the blocks that are held."""

    def __init__(self, setup: Setup, seed: int) -> None:
        super().__init__(setup, seed=seed, log_stats=True)
        self.reports: list[Report] = []
        self.kept: list[float] = []
        self.judged = self.exact = 0
        self.evicting = list(self.scheduler._evicting.values())
        update, free = self.scheduler.update_from_output, self.scheduler._free_request
        note, check = self.scheduler._reporter.kept, self.invariants.check

        def update_from_output(planned: Any, output: Any) -> Any:
            plan = getattr(planned, PLAN, None)
            setattr(output, MEASURED, dict(seconds=[0.5] * len(plan.evictions) if plan else []))
            getattr(output, MEASURED)["head_spread"] = []
            outputs = update(planned, output)
            reports = [
                report
                for each in outputs.values()
                if each.scheduler_stats is not None
                and (report := detach(each.scheduler_stats)) is not None
            ]
            assert len(reports) <= 1
            self.reports += reports
            return outputs

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            expected, before = self.share_held(request), len(self.kept)
            result = free(request, *args, **kwargs)
            if expected is not None and not replays(request.request_id):
                assert self.kept[before:] == [expected]
                self.judged += expected < 1
            return result

        self.scheduler.update_from_output = update_from_output
        self.scheduler._free_request = free_request
        self.scheduler._reporter.kept = lambda share: (self.kept.append(share), note(share))
        self.invariants.check = lambda: (check(), self.check_saved())

    def check_saved(self) -> None:
        """Without eviction every entry of a request's block list would be a block.

        Requests that share one hold it together: then it is saved once at most.
        """
        without, held = 0, set()
        for manager in self.evicting:
            for request_id, blocks in manager.req_to_blocks.items():
                without += len(blocks)
                mine = [block for block in blocks if not block.is_null]
                if (holding := holdings(manager).get(request_id)) is not None:
                    mine += holding.blocks
                held.update(block.block_id for block in mine)
        saved = sum(manager.blocks_saved for manager in self.evicting)
        if self.invariants.tally.hits:
            assert saved <= without - len(held)
        else:
            assert saved == without - len(held)
            self.exact += 1

    def share_held(self, request: Any) -> float | None:
        """By the blocks; None while an eviction is in flight, or where nothing was computed."""
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        held = 0
        for manager in self.evicting:
            nulls = sum(b.is_null for b in manager.req_to_blocks.get(request.request_id, ()))
            holding = holdings(manager).get(request.request_id)
            if holding is not None and holding.replaced_in_flight:
                return None
            stored = len(holding.store) if holding is not None else 0
            held += tokens + (stored - nulls) * self.setup.block_size
        return held / (tokens * len(self.evicting)) if tokens > 0 else None


@pytest.mark.slow
def test_reports_under_random_load() -> None:
    totals: Counter[str] = Counter()

    def reports(scenario: Scenario) -> None:
        day = Day(scenario)
        day.engine = core = Metered(scenario.setup, scenario.seed)
        for event in scenario.events:
            getattr(day, event[0])(*event[1:])
        core.finish()
        counters = core.scheduler.eviction_counters
        for name in TOTALS:
            assert sum(getattr(report, name) for report in core.reports) == getattr(counters, name)
        sent = [count for report in core.reports for count in report.evictions.values()]
        assert sum(prefill for prefill, _ in sent) == counters.evictions_prefill
        assert sum(decode for _, decode in sent) == counters.evictions_decode
        assert sum(len(report.seconds) for report in core.reports) == counters.evictions
        assert [s for report in core.reports for s in report.kept_share] == core.kept
        assert not core.reports or core.reports[-1].blocks_saved == 0
        totals.update(policy for report in core.reports for policy in report.evictions)
        totals["most saved"] = max([totals["most saved"], *(r.blocks_saved for r in core.reports)])
        totals.update(judged=core.judged, exact=core.exact, **day.totals())

    names = ("snapkv", "streaming-llm", "most saved", "judged", "exact", "preemptions",
             "aborts", "evictions_prefill", "evictions_decode", "evictions_in_place",
             "postponed", "skipped_shared")  # fmt: skip
    play_until_seen(reports, SCENARIO_COUNT, totals, names)
