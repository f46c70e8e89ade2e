"""Where blocks are short, requests go down the budgets that were tried, the cheapest loss first."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from operator import itemgetter

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_kvevict.audit.replays import Replays
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.memory import Memory
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.engine.turns import Turns
from vllm_kvevict.policies.requirements import NOTHING
from vllm_kvevict.settings.budget import budget_share
from vllm_kvevict.settings.requests import RequestOptions
from vllm_kvevict.target.ladder import Ladder

IN_VAIN = 8
"""Requests that a step looks at for nothing; each takes 0.6 ms with 8 groups."""

REST = 8
"""Steps short of blocks in which such a request is not looked at again."""


class Stairs:
    """Takes requests down one rung at a time, where one would otherwise be preempted.

    Under pressure a decoding request becomes one that asked for the next smaller budget, evicts
    to it, and goes on so. A preempted one has lost its blocks: it is again what it had come to.

    Args:
        core: What the engine works on.
        memory: What running requests take.
        turns: Who is looked at in a step.
        replays: Of audits.

    """

    def __init__(self, core: EvictionCore, memory: Memory, turns: Turns, replays: Replays) -> None:
        self._core = core
        self._memory = memory
        self._turns = turns
        self._replays = replays
        self.settled: dict[str, Ladder] = {}
        """Requests whose budget is chosen, by id."""

    @property
    def low_mark(self) -> int:
        """Free blocks beside the reserve below which eviction under pressure begins."""
        return self._memory.watermarks.low - self._memory.watermarks.reserve

    @property
    def may_lower(self) -> bool:
        """Whether a running request may go down."""
        return any(one.below is not None for one in self._running())

    def _running(self) -> Iterator[Ladder]:
        for request in self._core.scheduler.running:
            if request.request_id in self.settled:
                yield self.settled[request.request_id]

    def begin_step(self) -> int:
        """Before a step is scheduled: blocks that running requests lack, and nobody gives back."""
        managers = self._core.managers.values()
        for one in self._running():
            state = one.state
            if one.gain and state.evicted_at != one.since:
                one.gain = sum(manager.leaving(state) for manager in managers)
            elif one.gain and state.quiet_until > state.request.num_computed_tokens:
                # It was put off, because others hold its blocks.
                one.gain, one.rung = 0, one.before
                self._stand(one, one.rung, state)
                state.refresh()
        missing = self._memory.reserve() - self._core.free
        if missing <= 0 or not self.may_lower:
            return 0
        under_pressure = sum(one.expected_gain for one in self._core.table.on_demand.values())
        return max(0, missing - under_pressure - sum(map(self._gives, self._running())))

    def _gives(self, one: Ladder) -> int:
        """Blocks that a request will give back anyway: it goes down, or its interval ends."""
        if one.gain or one.state.phase is Phase.PREFILL:
            return one.gain
        end = one.request.num_computed_tokens + self._memory.lead
        dues = [(t, t.due) for t in one.state.timelines.values() if t.due is not None]
        return sum(max(0, timeline.gain(due)) for timeline, due in dues if due < end)

    def lower(self, missing: int) -> None:
        """Take requests down until they give back so many blocks, each by one rung."""
        ready = [(self._place(one), one) for one in self._running() if self._may_step(one)]
        vain = 0
        for _, one in sorted(ready, key=itemgetter(0)):
            if missing <= 0 or vain >= IN_VAIN:
                return
            gain, new = self._step(one)
            if gain <= 0:
                vain, one.rest = vain + 1, REST
                continue
            state, share = one.state, one.below
            assert share is not None
            one.before, one.rung, one.gain, one.since = one.rung, share, gain, state.evicted_at
            state.options, state.rules, state.needs = new.options, new.rules, new.needs
            state.timelines = new.timelines
            state.refresh()
            self._turns.look_soon(state)
            self._replays.draw(state)
            self._core.counters.target_lowered += 1
            missing -= gain

    def _may_step(self, one: Ladder) -> bool:
        """Whether a request may take a step down now, if that gives blocks back."""
        if one.rest:
            one.rest -= 1
            return False
        state, request = one.state, one.request
        start = request.num_computed_tokens
        known = request.num_tokens_with_spec + request.num_output_placeholders
        in_flight = any(holding.retiring for holding in state.holdings.values())
        # Of drafts not all will be accepted.
        decodes = request.num_prompt_tokens <= start >= known - 1
        busy = one.gain or in_flight or state.phase is Phase.PREFILL
        return decodes and not busy and one.below is not None

    def _place(self, one: Ladder) -> tuple[int, float]:
        """Least important first, then the smallest loss for a token that goes."""
        assert one.below is not None
        ranked = self._core.scheduler.policy == SchedulingPolicy.PRIORITY
        loss = one.nats[one.below] - one.nats.get(one.rung, 0.0)
        kept, left = (budget_share(share) or 1.0 for share in (one.rung, one.below))
        gone = one.request.num_computed_tokens * (kept - left)
        return -one.request.priority * ranked, loss / gone

    def _step(self, one: Ladder) -> tuple[int, RequestState]:
        """Blocks that a step down gives back, and a copy of the request's state behind it."""
        assert one.below is not None
        start, new = one.request.num_computed_tokens, copy(one.state)
        self._stand(one, one.below, new)
        window = self._core.table.window if new.needs.window == "required" else 0
        groups = []
        for group, timeline in new.timelines.items():
            if (due := timeline.turn(start, start + 1, window)) is not None:
                timeline.call(due)
                groups.append(group)
        return self._core.quote(new, groups, start).profitable.gain, new

    def _stand(self, one: Ladder, share: str, state: RequestState) -> None:
        """Give a state the settings of a rung: its timelines go on, or a whole one's begin."""
        former = state.timelines
        take_on(state, one.settings(share), self._core.table)
        # It is behind its prefill, whatever was computed since.
        end = state.request.num_computed_tokens
        state.timelines = {
            g: former[g].under(fresh.timeline) if former else replace(fresh, prefill_end=end)
            for g, fresh in state.fresh_timelines().items()
        }

    def preempted(self, request_id: str) -> None:
        """A request has lost its blocks: it begins again as what it had come to."""
        one = self.settled.get(request_id)
        if one is not None and one.rung != one.kept:
            one.rung, one.gain = one.kept, 0
            take_on(one.state, one.settings(one.kept), self._core.table)


def take_on(state: RequestState, options: RequestOptions, table: RequestTable) -> None:
    """Give a request other settings; its timelines are left as they are."""
    state.options, state.rules, state.needs = options, {}, NOTHING
    if options.evicts:
        state.rules = {group: options.timeline(rule) for group, rule in table.rules.items()}
        state.needs = table.needs.get(options.policy, NOTHING)
