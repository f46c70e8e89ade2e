"""Requests of the engine's own, each of which evicts as another one would with one budget."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_kvevict.audit.replays import MOST, Replays, add_first
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.schedule.step_plan import StepPlan
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.target.estimate import Estimate
from vllm_kvevict.target.ladder import Ladder, Rung

PATIENCE = 64
"""Steps that a value may be late; a GPU hands it over with a later step."""

LATE_S = 1.0
"""Seconds that it may be late beside that: steps without a token take no time."""

ANSWERS = 2
"""Tokens that a trial answers: the step that ends a request evicts nothing."""

ADMITTED = 4
"""Steps in which a trial must be admitted; it then makes room for those behind it."""


MOST_NAMES = 512
"""Trials whose names are remembered."""


@dataclass(eq=False)
class Trial:
    """A trial that has said nothing yet. ``replay`` is the name of what reads what it kept."""

    ladder: Ladder
    rung: Rung
    request: Request
    state: RequestState
    needs: int
    replay: str | None = None
    compared: bool = False
    asked: int = 0
    compared_s: float = 0.0


class Trials:
    """Starts trials, follows them, and ends those that are in the way.

    A trial's prompt is that of its request up to the eviction point. It has the computed blocks
    from the prefix cache, computes the window again, evicts into fresh blocks, and is replayed as
    an audited request is.

    Args:
        core: What the engine works on.
        replays: Of audits, and of trials.
        estimate: What answers lose where trials say so much.

    """

    def __init__(self, core: EvictionCore, replays: Replays, estimate: Estimate) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._replays = replays
        self._estimate = estimate
        self.under_way: dict[str, Trial] = {}
        """By request id."""
        self._names: dict[str, None] = {}
        """Ids of the last trials, also of those that are over: values may come late."""

    def needs(self, ladder: Ladder, rung: Rung) -> int:
        """Most blocks that a trial and its replay hold beside those of the request itself."""
        total = 0
        for group, manager in self._core.managers.items():
            size = manager.block_size
            store = rung.options.timeline(self._core.table.rules[group]).store_blocks(ladder.end)
            tail = blocks_for(ladder.end + ANSWERS, size) - ladder.hold // size
            total += store + 2 * (tail + 1)
        return total

    @property
    def outstanding(self) -> int:
        """Blocks that trials under way may still take."""
        return sum(one.needs for one in self.under_way.values() if one.replay is None)

    @property
    def waiting(self) -> int:
        """Trials and replays that have no place yet."""
        states, found = self._core.table.states, 0
        for request_id, one in self.under_way.items():
            name = request_id if one.replay is None else one.replay
            state = states.get(name)
            coming = one.replay is not None and self._replays.under_way(one.replay)
            found += not state.holds_blocks if state is not None else coming
        return found

    @property
    def room(self) -> int:
        """Trials that may begin."""
        return max(0, MOST - len(self.under_way))

    def of(self, ladder: Ladder) -> list[Trial]:
        """Trials under way of a request, the smallest budget first."""
        mine = [one for one in self.under_way.values() if one.ladder is ladder]
        return sorted(mine, key=lambda one: ladder.rungs.index(one.rung))

    def start(self, ladder: Ladder, rung: Rung) -> None:
        """Add a trial to vLLM's scheduler, before all that wait."""
        of = ladder.request
        self._core.counters.trials += 1
        request = Request(
            request_id=f"{of.request_id}-target-{rung.share}-{self._core.counters.trials}",
            prompt_token_ids=list(of.all_token_ids[: ladder.end]),
            sampling_params=SamplingParams(temperature=0, max_tokens=ANSWERS, ignore_eos=True),
            pooling_params=None,
            client_index=of.client_index,
            arrival_time=of.arrival_time,
            cache_salt=of.cache_salt,
            priority=of.priority,
            block_hasher=of._block_hasher,
        )
        options = replace(rung.options, at=None, interval=0, prefill_interval=0, target=None)
        state = self._core.table.add(request, options)
        # Hits of clients are counted.
        state.trial = state.hit_capped = True
        self._replays.draw(state)
        add_first(self._scheduler, request)
        trial = Trial(ladder, rung, request, state, self.needs(ladder, rung))
        self.under_way[request.request_id] = trial
        if len(self._names) >= MOST_NAMES:
            del self._names[next(iter(self._names))]
        self._names[request.request_id] = None

    def is_trial(self, request_id: str) -> bool:
        """Whether a request was one of the last trials."""
        return request_id in self._names

    def planned(self, plan: StepPlan, num_scheduled_tokens: "dict[str, int]") -> None:
        """Note what a step does for trials, and let their evictions look as they would for it."""
        for eviction in plan.evictions:
            trial = self.under_way.get(eviction.request_id)
            if trial is not None:
                eviction.inside = trial.ladder.inside
        for replay in plan.replays:
            if replay.of in self.under_way:
                self.under_way[replay.of].replay = replay.request_id
        for replay in plan.compared:
            if replay.of in self.under_way:
                trial = self.under_way[replay.of]
                trial.compared, trial.asked, trial.compared_s = True, 0, time.monotonic()
        for request_id in self.under_way.keys() & num_scheduled_tokens.keys():
            self._core.counters.tokens_tried += num_scheduled_tokens[request_id]

    def take(self, request_id: str, nats: float) -> Ladder | None:
        """Note what a trial said; its ladder, or None where it was given up."""
        trial = self.under_way.get(request_id)
        if trial is None:
            return None
        ladder, share = trial.ladder, trial.rung.share
        policy, salt = ladder.options.policy, ladder.request.cache_salt
        ladder.nats[share] = self._estimate.loss(policy, share, nats, salt)
        self._end(trial)
        return ladder

    def tend(self) -> list[Ladder]:
        """Before a step: give up trials that will say nothing; returns their ladders."""
        return self.stop([one for one in self.under_way.values() if self._is_lost(one)])

    def _is_lost(self, trial: Trial) -> bool:
        if trial.compared:
            trial.asked += 1
            return trial.asked > PATIENCE and time.monotonic() > trial.compared_s + LATE_S
        if trial.replay is not None:
            return not self._replays.under_way(trial.replay)
        if trial.request.request_id not in self._scheduler.requests:
            return True
        if trial.state.holds_blocks:
            return False
        trial.asked += 1
        return trial.asked > ADMITTED or trial.request.num_preemptions > 0

    def make_way(self, missing: int) -> list[Ladder]:
        """Give up trials, the last first, until the pool has so many blocks more."""
        given_up: list[Ladder] = []
        want = self._core.free + missing
        for trial in reversed(list(self.under_way.values())):
            if self._core.free >= want:
                break
            given_up += self.stop([trial])
        return given_up

    def stop(self, trials: Iterable[Trial]) -> list[Ladder]:
        """End trials without a word; returns their ladders."""
        stopped = list(trials)
        for trial in stopped:
            self._end(trial)
        return [trial.ladder for trial in stopped]

    def _end(self, trial: Trial) -> None:
        request_id = trial.request.request_id
        del self.under_way[request_id]
        if trial.replay is not None:
            self._replays.stop(trial.replay)
        if request_id in self._scheduler.requests:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
