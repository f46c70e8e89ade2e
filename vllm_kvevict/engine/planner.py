"""The plan of each step: which requests record their queries, and which evict.

Under ``--kv-eviction-shared-blocks keep`` an eviction that gains no blocks, because other
requests hold the same prefix, is postponed; a preempted prompt that is evicted while it streams
in is the exception. Under ``evict`` a request that evicts in its first step is admitted with the
blocks that it lacks, and a running request waits for them.
"""

from collections.abc import Iterator, Mapping, Sequence

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.metrics.report import Reporter
from vllm_kvevict.rules.quote import Quote
from vllm_kvevict.rules.rule import decode_evictions
from vllm_kvevict.rules.step_plan import Eviction, StepPlan
from vllm_kvevict.stores.key import largest_share


class StepPlanner:
    """Plans evictions for steps that vLLM has scheduled.

    Args:
        core: The engine core.
        turns: The queue of the ring slots.
        stores: The published stores.
        reporter: Counts every eviction; None if statistics are off.
        parts: Parts that may release blocks before an eviction is deferred.

    """

    def __init__(
        self,
        core: EvictionCore,
        turns: RingQueue,
        stores: PublishedStores,
        reporter: Reporter | None,
        parts: Sequence[Part],
    ) -> None:
        self._core = core
        self._table = core.table
        self._turns = turns
        self._stores = stores
        self._reporter = reporter
        self._parts = parts
        self._counters = core.counters
        self._left = 0
        """Number of decode evictions that the step may still include."""
        self._lacking: dict[str, int] = {}
        """Fresh blocks that postponed evictions of the step need and the pool lacks, by request."""
        self.short = 0
        """Blocks for one eviction that the last step postponed. Admissions leave them free."""

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> StepPlan:
        """Return the plan of a step.

        Args:
            num_scheduled_tokens: Tokens that each request computes in the step, by request id.

        """
        plan = StepPlan()
        self._admit(plan)
        self._stores.suffixes.publish()
        self._left = self.max_decode_evictions()
        self._lacking.clear()
        observed: list[tuple[RequestState, int]] = []
        for state in self._in_order():
            num_tokens = num_scheduled_tokens.get(state.request_id)
            if num_tokens is None or not state.holds_blocks:
                continue
            end = (start := state.request.num_computed_tokens) + num_tokens
            if state.accumulates_attention:
                plan.accumulating.append(state.request_id)
            if state.request_id in self._turns.waiting:
                continue
            observed.append((state, end))
            if state.observes(end):
                self._plan_observed(plan, state, start, end)
        for state in self._turns.waiting.values():
            if (num_tokens := num_scheduled_tokens.get(state.request_id)) is not None:
                end = state.request.num_computed_tokens + num_tokens
                self._counters.postponed_ring += end >= state.next_eviction
        # Only after all are planned: a slot returned within the step would have two writers.
        for state, end in observed:
            if state.in_prefill(end):
                self._stores.passed(state, end)
            self._turns.finish_step(state, end)
        self.short = self._reserve()
        self._stores.copy(plan)
        return plan

    def _admit(self, plan: StepPlan) -> None:
        """Add the stores that newly admitted requests reuse to the plan."""
        for state in self._table.admitted:
            state.admitted_at = None
            state.prefix_found = 0 if state.pending_store else state.request.num_computed_tokens
            self._stores.started(state)
            if state.pending_store is not None:
                plan.reused[state.request_id] = self._stores.plan(state)
                store, state.pending_store = state.pending_store, None
                if state.replay_store is None:
                    self._note_evicted(state)
                    store.starts += 1
                    store.superseded = False
                    self._stores.windows.keep_of(state, store)
                    self._counters.stores_reused += 1
                    self._counters.tokens_reused += state.request.num_computed_tokens
        self._table.admitted.clear()

    def _reserve(self) -> int:
        """Return the blocks of the smallest postponed eviction, if other requests may return
        enough.

        If running requests hold too few blocks, the eviction runs when a request that shares its
        blocks ends, and admissions make no difference.
        """
        if not self._lacking:
            return 0
        needed, available = min(self._lacking.values()), self._core.free
        for request in self._core.scheduler.running:
            if available >= needed:
                break
            state = self._table.states.get(request.request_id)
            if state is not None and state.request_id not in self._lacking:
                available += self._core.own_blocks(state, needed - available)
        return needed if needed <= available else 0

    def max_decode_evictions(self) -> int:
        """Return the maximum number of decode evictions per step, by the server's intervals.

        It is the number of running requests if tokens must not depend on other requests.
        """
        running = len(self._core.scheduler.running)
        if self._table.evicts_shared:
            return running
        return decode_evictions(running, self._table.rules.values())

    def hold_back(self) -> None:
        """Let some requests compute nothing in the step that is about to be scheduled.

        A step includes a limited number of evictions of answers, and a request that waits for its
        turn is evicted at a greater length. Requests with a shared context, or whose evictions
        depend on tokens alone, wait before they reach that length, so that what they keep does not
        depend on how many of them there are.
        """
        scheduler, left = self._core.scheduler, self.max_decode_evictions()
        for state in self._turns.near.values():
            request = state.request
            if state.waits_its_turn and state.next_eviction == request.num_computed_tokens + 1:
                if left < 1:
                    # The number of the step is increased when it is scheduled.
                    after = scheduler.current_step + 2
                    eligible = max(request.next_decode_eligible_step, after)
                    request.next_decode_eligible_step = eligible
                left -= 1

    def _in_order(self) -> Iterator[RequestState]:
        """Yield the requests that a plan may include. Prompts come first, since they may take ring
        slots from others."""
        prefilling = list(self._table.prefilling.values())
        yield from prefilling
        self._turns.wake_due()
        self._turns.share_out(self._worth_recording)
        yield from list(self._turns.near.values())
        seen = {state.request_id for state in prefilling} | self._turns.near.keys()
        yield from [s for r, s in self._table.accumulating.items() if r not in seen]

    def _worth_recording(self, state: RequestState) -> bool:
        end = state.request.num_computed_tokens + 1
        return bool(self._profitable(state, state.coming_groups(end), end, coming=True).parts)

    def _profitable(
        self, state: RequestState, groups: list[int], end: int, coming: bool = False
    ) -> Quote:
        """Quote the ``groups`` that gain blocks by their next eviction, and defer the others.

        The other groups share too many blocks with other requests and are deferred to their next
        interval. If evictions run even if blocks are shared, all groups are quoted. With
        ``coming``, blocks held by a replay count as released, since the replay ends before the
        eviction.
        """
        quote = self._core.quote(state, groups, end, after_replay=coming)
        if self._table.evicts_shared or state.must_evict:
            return quote
        if quote.unprofitable and any(part.let_go(state) for part in self._parts):
            quote = self._core.quote(state, groups, end, after_replay=coming)
        for group in quote.unprofitable:
            state.defer(group, end)
            self._counters.skipped_shared += 1
        return quote.profitable

    def _plan_observed(self, plan: StepPlan, state: RequestState, start: int, end: int) -> None:
        """Plan a step that computes queries of the next window, and that may end with the
        eviction."""
        if state.in_prefill(end) and state.ring is None and state.reads_window(end):
            if not self._profitable(state, state.coming_groups(end), end, coming=True).parts:
                return
            self._turns.record_prefill(state, start, end)
        if state.ring is not None:
            plan.rings[state.request_id] = state.ring
        groups = state.due_groups(end)
        if not groups or state.last_step(end):
            return
        if not self._turns.window_ready(state, start, end):
            self._counters.postponed_ring += 1
        elif not state.in_prefill(end) and self._left < 1 and not state.waits_its_turn:
            self._counters.postponed_turn += 1
        elif (quote := self._profitable(state, groups, end)).parts:
            self._stores.windows.make_room(quote.fresh)
            if quote.fresh > self._core.free:
                self._counters.postponed_blocks += 1
                self._lacking[state.request_id] = quote.fresh
            else:
                plan.evictions.append(self._evict(state, quote, end))

    def _evict(self, state: RequestState, quote: Quote, end: int) -> Eviction:
        in_prefill = state.in_prefill(end)
        self._note_evicted(state)
        reads_window = state.reads_window(end)
        ring = state.ring if reads_window and self._turns.recorded(state, end) else None
        if state.makes_links:
            self._stores.extends(state, end)
        superseded = self._stores.supersede(state, end)
        evictions = self._core.evict(state, quote, end, superseded)
        self._stores.windows.let_go(state, superseded)
        self._stores.drop_containing(
            block for eviction in evictions for block in eviction.store[: eviction.reused]
        )
        # A store is published only if a policy that reads a window got it, because the key does not
        # include that.
        scored = ring is not None or not reads_window
        if not scored:
            state.on_chain = False
        store = self._stores.publish(state, end, evictions) if scored else None
        for eviction in evictions:
            eviction.published = store is not None or state.makes_links
        if store is not None:
            state.compute_over(store)
        self._left -= not in_prefill
        if self._reporter is not None:
            self._reporter.evicted(state.options.policy, in_prefill)
        sizes = [state.progress[part.group_id].rule.page_tokens for part in evictions]
        self._counters.evicted(in_prefill, state.on_demand, evictions, sizes)
        policy, first = state.options.policy, state.options.protect_first
        share, in_context = largest_share(state.progress, end), end <= state.context_end
        return Eviction(state.request_id, end, ring, evictions, policy, first, share, in_context)

    def _note_evicted(self, state: RequestState) -> None:
        """Record that a request evicts, or that it starts with what another one kept."""
        if not state.evicted:
            state.evicted = True
            self._counters.tokens_protected += state.options.protect_first

    def free_replaced(self, plan: StepPlan) -> None:
        """Free the blocks that the evictions of a processed step replaced."""
        for eviction in plan.evictions:
            state = self._table.states.get(eviction.request_id)
            for group in eviction.groups:
                manager = self._core.managers[group.group_id]
                self._counters.blocks_freed += manager.free_replaced(state, group)
