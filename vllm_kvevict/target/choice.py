"""Which budget each request with a target comes to, and when it is known."""

import sys
from collections.abc import Sequence
from itertools import takewhile

from vllm.v1.request import Request

from vllm_kvevict.audit.replays import Replays
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.metrics.report import Reporter
from vllm_kvevict.schedule.step_plan import StepPlan
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.settings.names import NONE
from vllm_kvevict.settings.requests import RequestOptions
from vllm_kvevict.target.estimate import Estimate
from vllm_kvevict.target.ladder import SHORT, Ladder, Rung
from vllm_kvevict.target.stairs import Stairs, take_on
from vllm_kvevict.target.trials import Trials
from vllm_kvevict.target.verdicts import Verdicts

PATIENCE = 64
"""Steps that a request waits without a trial; then it takes the server's budget."""

MOST_LOST = 8
"""Trials of a request that may come to nothing."""

REST = 4
"""Steps between a trial that came to nothing and the next."""

STUCK = 8
"""Steps in which nobody runs but requests that wait for trials; a replay takes some to begin."""


class Targets:
    """Holds requests with a target until their budget is known.

    Such a request evicts nothing and stops before its window. When its budget is chosen it becomes
    what a request is that asked for this budget. It never waits for ever: without blocks or places
    for trials it takes the server's.

    Args:
        core: What the engine works on.
        replays: What reads what trials kept.
        stores: Published stores.
        estimate: What answers lose where trials say so much.
        places: Requests that vLLM runs at once.

    """

    def __init__(
        self,
        core: EvictionCore,
        replays: Replays,
        stores: PublishedStores,
        estimate: Estimate,
        places: int,
    ) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._table = core.table
        self._replays = replays
        self._stores = stores
        self._places = places
        self._estimate = estimate
        self.trials = Trials(core, replays, estimate)
        self.reporter: Reporter | None = None
        self.pending: dict[str, Ladder] = {}
        """By id of the request that waits."""
        self.verdicts = Verdicts()
        self.stairs: Stairs
        """Those whose budget is known; set as soon as all that it works on is there."""
        self._stuck = 0

    def arrive(self, ladder: Ladder) -> RequestOptions:
        """The settings that a request with a target begins with."""
        if (known := self.verdicts.get(ladder.key)) is not None:
            kept, ladder.nats = known
            return self._choose(ladder, kept)
        if self._places < 2:
            return self._choose(ladder, SHORT)
        for other in self.pending.values():
            if other.key == ladder.key:
                ladder.nats = other.nats
        self.pending[ladder.request.request_id] = ladder
        return RequestOptions(NONE)

    def begin(self, state: RequestState) -> None:
        """Hold a request that has arrived, if its budget is not known."""
        if (ladder := self.stairs.settled.get(state.request_id)) is not None:
            ladder.state = state
        if (ladder := self.pending.get(state.request_id)) is not None:
            ladder.state = state
            # A chunk that is clipped to nothing would keep it, and all behind it, in the queue.
            size = max(manager.block_size for manager in self._core.managers.values())
            state.most_cached = ladder.hold - size

    def clip(self, request_id: str, start: int, end: int, running: bool) -> int:
        """Where a chunk of prefill over [start, end) ends."""
        ladder = self.pending.get(request_id)
        if ladder is None:
            return end
        clipped = min(end, max(start, ladder.hold))
        if clipped == start < end and not running:
            # Nothing may be admitted without a token.
            self._settle(ladder)
            return end
        return clipped

    def begin_step(self) -> None:
        """Before a step is scheduled: give way, go down, give up, start what memory allows."""
        held = []
        for request_id, ladder in list(self.pending.items()):
            if self._gone(ladder):
                self._leave(ladder)
                continue
            # Chunks of what is in here are clipped.
            self._table.stopping[request_id] = ladder.state
            if ladder.held:
                held.append(ladder)
        trials = self.trials.under_way
        self.trials.stop([one for one in trials.values() if one.ladder not in held])
        self._lost(self.trials.tend())
        missing = self.stairs.begin_step()
        if missing and trials:
            # What they held may come back with the next step.
            self._lost(self.trials.make_way(missing))
        elif missing:
            self.stairs.lower(missing)
        if not held:
            self._stuck = 0
            return
        if (spare := self._spare()) < 0 and trials:
            self._lost(self.trials.make_way(-spare))
            spare = self._spare()
        if not missing:
            self._start(held, spare)
        self._give_up(held)

    @property
    def places(self) -> int:
        """Requests that vLLM may run in the coming step: one place is kept for trials."""
        if not self.pending:
            return self._places
        # Those at the front of the queue are admitted before any client's.
        first = sum(1 for _ in takewhile(self._is_own, self._scheduler.waiting))
        taken = len(self._scheduler.running) + first
        return self._places - (taken < self._places)

    def _is_own(self, request: Request) -> bool:
        """Whether a request is a trial or a replay."""
        state = self._table.states.get(request.request_id)
        return state is not None and (state.trial or state.given is not None)

    def planned(self, plan: StepPlan, num_scheduled_tokens: dict[str, int]) -> None:
        """A step is planned."""
        self.trials.planned(plan, num_scheduled_tokens)

    def heard(self, request_id: str, nats: float) -> None:
        """A trial has said what its budget loses of its last tokens."""
        ladder = self.trials.take(request_id, nats)
        if ladder is None:
            return
        if ladder.passed is not None:
            larger = [t for t in self.trials.of(ladder) if t.rung not in ladder.open]
            self.trials.stop(larger)
        if not ladder.open:
            self._settle(ladder)

    def reset(self) -> None:
        """Hold nothing, and know nothing: the model's weights may change."""
        self.trials.stop(self.trials.under_way.values())
        self.verdicts.clear()
        self._estimate.forget()

    def told(self, request_id: str) -> dict[str, object] | None:
        """What a request that ends came to, for its answer; None for one without a target."""
        if (ladder := self.stairs.settled.pop(request_id, None)) is None:
            return None
        nats = ladder.nats.get(ladder.rung)
        return {"kept": ladder.rung} | ({} if nats is None else {"kl_nats": round(nats, 6)})

    def _spare(self) -> int:
        """Free blocks, less those that running requests may take in the coming step."""
        scheduler, steps = self._scheduler, 1 + self._scheduler.defer_block_free
        taken = 0
        sizes = self._core.cache.coordinator.group_block_sizes
        chunk = scheduler.max_num_scheduled_tokens
        for request in scheduler.running:
            computed = request.num_computed_tokens
            known = request.num_tokens_with_spec + request.num_output_placeholders
            ladder = self.pending.get(request.request_id)
            last = known if ladder is None else min(known, ladder.hold)
            tokens = min(max(0, last - computed), chunk) * steps + scheduler.num_lookahead_tokens
            taken += sum(
                blocks_for(computed + tokens, size) - blocks_for(computed, size) for size in sizes
            )
        return self._core.free - taken

    def _start(self, held: Sequence[Ladder], spare: int) -> None:
        """Start trials of requests that are held, the smallest budgets first."""
        scheduler = self._scheduler
        places = self._places - len(scheduler.running) - self.trials.waiting
        spare -= self.trials.outstanding + self._core.cache.watermark_blocks + self.stairs.low_mark
        tried = {trial.ladder.key: trial.ladder for trial in self.trials.under_way.values()}
        chosen: list[tuple[Ladder, Rung]] = []
        for ladder in held:
            ladder.rest = max(0, ladder.rest - 1)
            if tried.setdefault(ladder.key, ladder) is not ladder or ladder.rest:
                continue
            mine = {trial.rung for trial in self.trials.of(ladder)}
            for rung in ladder.open:
                needs = self.trials.needs(ladder, rung)
                if rung in mine:
                    continue
                if needs > spare or len(chosen) >= min(places, self.trials.room):
                    break
                chosen.append((ladder, rung))
                spare -= needs
        # Each goes to the front of the queue: the smallest budget last.
        for ladder, rung in reversed(chosen):
            self.trials.start(ladder, rung)

    def _give_up(self, held: Sequence[Ladder]) -> None:
        """Let requests go on that have waited long enough, or that wait for each other."""
        tried = {trial.ladder.key for trial in self.trials.under_way.values()}
        for ladder in held:
            ladder.waited += ladder.key not in tried
            if ladder.waited > PATIENCE or ladder.lost > MOST_LOST:
                self._settle(ladder)
        # A value that is on its way from the device comes; what waits in the queue may not.
        late = any(trial.compared for trial in self.trials.under_way.values())
        stuck = len(held) == len(self._scheduler.running) and not late
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck > STUCK:
            self._settle(held[0])

    def _gone(self, ladder: Ladder) -> bool:
        """Whether its request has ended."""
        return self._table.states.get(ladder.request.request_id) is not ladder.state

    def _lost(self, ladders: Sequence[Ladder]) -> None:
        for ladder in ladders:
            ladder.lost, ladder.rest = ladder.lost + 1, REST

    def _settle(self, ladder: Ladder) -> None:
        """Choose, for all that ask the same."""
        self.trials.stop(self.trials.of(ladder))
        kept = SHORT if ladder.open else ladder.whole
        if ladder.passed is not None:
            kept = ladder.passed.share
        if not ladder.open:
            self.verdicts.put(ladder.key, kept, ladder.nats)
        for other in [one for one in self.pending.values() if one.key == ladder.key]:
            # Who was aborted in this very step leaves with the next.
            if not self._gone(other):
                self._follow(other, self._choose(other, kept))

    def _choose(self, ladder: Ladder, kept: str) -> RequestOptions:
        """The settings that a request comes to, which is counted and told."""
        self._core.counters.targeted(kept)
        if (nats := ladder.nats.get(kept)) is not None and self.reporter is not None:
            self.reporter.chosen(nats)
        ladder.kept = ladder.rung = kept
        self.stairs.settled[ladder.request.request_id] = ladder
        return ladder.settings(kept)

    def _follow(self, ladder: Ladder, options: RequestOptions) -> None:
        """Let a request be what it would have been with these settings from the beginning."""
        del self.pending[ladder.request.request_id]
        state, table = ladder.state, self._table
        table.stopping.pop(state.request_id, None)
        state.most_cached = sys.maxsize
        take_on(state, options, table)
        state.timelines = state.fresh_timelines()
        state.refresh()
        table.note_stops(state)
        self._stores.read_key(state)
        self._replays.draw(state)
        if state.holds_blocks and options.evicts:
            # Without rules its prefill had no end that anybody waited for.
            state.phase, table.prefilling[state.request_id] = Phase.PREFILL, state

    def _leave(self, ladder: Ladder) -> None:
        """Its request is gone."""
        self.trials.stop(self.trials.of(ladder))
        del self.pending[ladder.request.request_id]
