"""Work that grew with what a step has nothing to do with.

Counted in lines that run, not in time. Blocks of 8, window 8, budget 40, as in ``test_scheduler``.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import SYNC, counters, evictions, no_stop, tokens
from tests.engine.harness import Engine, Setup
from tests.engine.work import lines_run


class Bare(Engine):
    """An engine whose invariants, which are slow where there are many blocks, are not checked."""

    def __init__(self, setup: Setup, log_stats: bool = False) -> None:
        super().__init__(setup, no_stop, log_stats=log_stats)
        for name in ("scheduled", "executed", "check"):
            setattr(self.invariants, name, lambda *_: None)

    def scheduling(self) -> int:
        """Lines that scheduling one step runs."""
        lines = lines_run(self.schedule)
        self.settle()
        return lines

    def processing(self) -> int:
        """Lines that processing one step runs."""
        self.schedule()
        return lines_run(self.settle)


def by_arrivals(running: int) -> float:
    """Lines by which a step grows where in turn one request is let in and one ends; more wait."""
    setup = replace(SYNC, interval=128, blocks=240 * running, max_num_seqs=running + 1)
    shares = dict(pyramid=4, shares=(1.9, 1.2, 0.5, 0.4))
    core = Bare(replace(setup, max_batched=8192, longest=2048, **shares))
    for index in range(running):
        core.add(tokens(100, index), 600)
    for _ in range(3):
        core.step()
    quiet = sum(core.scheduling() for _ in range(16)) / 16
    for index in range(60):
        core.add(tokens(20, 1000 + index), 2)
    for _ in range(4):
        core.step()
    return sum(core.scheduling() for _ in range(16)) / 16 - quiet


def test_arrivals_do_not_forecast_every_request_again():
    """A user of a busy server waits for each token: 41 ms a step at 256 running, with 8 groups.

    What running requests will take was computed anew, for all of them and each group, whenever one
    came or went.
    """
    few, many = by_arrivals(8), by_arrivals(40)
    assert (many - few) / 32 < 20, f"lines a running request and arrival: {few}, {many}"


@pytest.mark.parametrize("lost", [False, True], ids=["idle", "lost"])
def test_reports_do_not_count_every_store_again(lost):
    """A user of a server that has read 14,000 documents: 25 ms a step that reports anything.

    Stores whose blocks had long gone to others were counted, too: they were kept in mind until
    their document was asked about again.
    """
    # The pool never fills: events of removed blocks would be counted as well.
    core = Bare(replace(SYNC, blocks=6000, max_batched=512, longest=400), log_stats=True)
    asked = {"kv_eviction_at": 100, "kv_eviction_interval": 0}
    lines, documents = [], 0
    for most in (80, 240):
        while documents < most:
            core.add(tokens(130, documents), 2, asked=asked)
            documents += 1
            drain(core)
        assert counters(core).stores_published == documents
        if lost:
            core.hold(0)
            core.release()
            # Its events are taken by the next step.
            core.add(tokens(100, 800 + documents), 2)
            drain(core)
        core.add(tokens(100, 900 + documents), 2)
        lines.append(core.processing())
        drain(core)
    assert lines[1] - lines[0] < 160, f"a line for each store: {lines}"


def drain(core: Engine) -> None:
    for _ in range(50):
        if not core.scheduler.has_unfinished_requests():
            return
        core.step()
    raise AssertionError("not finished")


def with_a_prompt_that_waits(length: int) -> int:
    """Lines of a step in which a prompt waits that evicts as it streams in."""
    core = Bare(replace(SYNC, prefill_interval=16, blocks=90, longest=6000, max_batched=64))
    core.add(tokens(40), 100)
    core.step()
    core.hold(3)
    core.add(tokens(length, 1), 4)
    for _ in range(3):
        core.step()
    lines = min(core.scheduling() for _ in range(4))
    assert len(core.scheduler.waiting) == 1
    return lines


def test_a_prompt_that_waits_is_not_walked_through_in_every_step():
    """A user shares the server with a waiting prompt of 131,072 tokens: 61 ms per token.

    That is the cost if each step goes through all evictions of the prompt, for each group.
    """
    short, long = with_a_prompt_that_waits(300), with_a_prompt_that_waits(5000)
    assert long - short < 30, f"lines: {short}, {long}"


def test_prompts_that_evict_as_they_stream_in_do_not_all_do_so_in_one_step():
    """The evictions of 40 prompts, at short intervals, delay the tokens of one user."""
    setup = replace(SYNC, prefill_interval=32, interval=0, longest=600, max_num_seqs=40)
    core = Bare(replace(setup, max_batched=2048, blocks=900))
    requests = [core.add(tokens(200, seed), 2) for seed in range(40)]
    ends: dict[str, list[int]] = {}
    while core.scheduler.has_unfinished_requests():
        found = evictions(core.schedule())
        core.settle()
        assert sum(end < 200 for end in found.values()) <= 16
        for request_id, end in found.items():
            ends.setdefault(request_id, []).append(end)
    assert all(ends[request.request_id] == [72, 104, 136, 168, 200] for request in requests)


def with_an_interval(interval: int) -> int:
    """Lines of a step in which one request comes and another one waits."""
    core = Bare(replace(SYNC, interval=interval, blocks=900, longest=300_000, max_num_seqs=2))
    core.add(tokens(20), 280_000)
    core.step()
    core.add(tokens(20, 1), 280_000)
    core.add(tokens(100, 2), 280_000)
    lines = core.scheduling()
    assert len(core.scheduler.running) == 2 and core.scheduler.waiting
    return lines


def test_a_forecast_costs_the_same_for_any_interval():
    """27 ms whenever a request came or went, at an interval of 32,768, which stands for never."""
    short, long = with_an_interval(64), with_an_interval(262_144)
    assert long - short < 100, f"lines: {short}, {long}"


def evicting_over_its_last_state(blocks: int) -> int:
    """Lines of the step of a conversation that runs the most, in a pool that is nearly empty."""
    core = Bare(replace(SYNC, every=32, blocks=blocks, max_batched=512, longest=1000))
    core.add(tokens(150), 200)
    lines = []
    while core.scheduler.has_unfinished_requests():
        lines.append(core.scheduling())
    assert counters(core).evictions > 6
    return max(lines)


def test_an_eviction_does_not_look_at_blocks_that_were_never_used():
    """1 to 7 ms for each eviction in a pool of 7,000 to 28,000 blocks that is not full."""
    small, large = evicting_over_its_last_state(400), evicting_over_its_last_state(8000)
    assert large - small < 100, f"lines: {small}, {large}"
