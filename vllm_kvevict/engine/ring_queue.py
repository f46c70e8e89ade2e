"""Order in which requests are examined, and the ring slots that record their queries.

Ring slots rotate among decoding requests. The step that ends a prompt takes a slot from the
request that began last. An eviction without a slot is postponed and tried again at every step. A
request that ends before its next eviction takes no slot.
"""

import sys
from collections.abc import Callable

from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.rules.ring_slots import RingSlots
from vllm_kvevict.rules.wakeups import WakeupQueue


class RingQueue:
    """Wakes decoding requests that come near an eviction, and hands out ring slots.

    A prompt needs its slot in the step that completes it, or it is not evicted. If no slot is free,
    it takes the slot of the decoding request that began to record last. Decoding requests wait in a
    queue, so that all of them evict, if less often than the interval asks for. A policy with an
    optional window records if a slot is left over.

    Args:
        table: All requests.
        slots: Ring slots, or None if no policy needs queries.
        tokens_a_step: Maximum number of tokens that a decoding request computes per step.

    """

    def __init__(self, table: RequestTable, slots: RingSlots | None, tokens_a_step: int) -> None:
        self.slots = slots
        self.near: dict[str, RequestState] = {}
        """Requests in NEAR that are not in the queue for a slot, in order of arrival or of their
        last evictions."""
        self._table = table
        self._wakeups: WakeupQueue[RequestState] = WakeupQueue(tokens_a_step)
        self._called: list[RequestState] = []
        self._asking: dict[str, RequestState] = {}
        """Requests in NEAR that lack a slot and are not in the queue."""
        self.waiting: dict[str, RequestState] = {}
        """Decoding requests in the queue for a slot."""
        self._recording: dict[str, RequestState] = {}
        """Decoding requests with a slot, the latest last."""

    @property
    def free_slots(self) -> int:
        """Number of free slots beyond those that the queue will take."""
        return max(0, self.slots.num_free - len(self.waiting)) if self.slots is not None else 0

    def window_ready(self, state: RequestState, start: int, end: int) -> bool:
        """Return whether a step over [start, end) completes the window that ends at ``end``.

        A slot that a prefill step could still take counts. The result is True for policies that do
        not require a window.
        """
        if state.needs.window != "required":
            return True
        if state.ring is not None:
            return self.recorded(state, end)
        assert self.slots is not None
        available = bool(self.slots.num_free or self._recording)
        return state.in_prefill(end) and available and start <= end - self._table.window

    def recorded(self, state: RequestState, end: int) -> bool:
        """Return whether the ring of a request holds the whole window that ends at ``end``."""
        return state.ring is not None and state.recorded_from <= end - self._table.window

    def record_prefill(self, state: RequestState, start: int, end: int) -> None:
        """Give a request a ring slot for a step of prefill over [start, end) that it observes.

        Decoding requests get their slots in :meth:`share_out`.
        """
        if self.slots is None or state.ring is not None or state.needs.window == "none":
            return
        if state.needs.window == "required":
            state.ring = self._slot_for_prompt()
        elif self.free_slots and start <= end - self._table.window:
            state.ring = self.slots.pop()
        # A step records its last w queries only.
        state.recorded_from = max(start, end - self._table.window)

    def _slot_for_prompt(self) -> int | None:
        """Return a free slot, or the slot of the decoding request that began last; None if there is
        none."""
        assert self.slots is not None
        slot = self.slots.pop()
        if slot is None and self._recording:
            request_id, loser = self._recording.popitem()
            slot, loser.ring = loser.ring, None
            if loser.needs.window == "required":
                self.waiting = {request_id: loser, **self.waiting}
                self.near.pop(request_id, None)
        return slot

    def wake_due(self) -> None:
        """Begin a step: requests that may have grown near an eviction become NEAR."""
        called, self._called = self._called, []
        for state in called + self._wakeups.next_step():
            if state.phase is not Phase.QUIET:
                continue
            quiet = state.quiet_until - state.request.num_computed_tokens
            if quiet > 0:
                self._sleep(state, quiet)
            else:
                state.phase = Phase.NEAR
                if state.request_id not in self.waiting:
                    self.near[state.request_id] = self._asking[state.request_id] = state

    def look_soon(self, state: RequestState) -> None:
        """Examine a request in the step that is about to be planned."""
        self._called.append(state)

    def share_out(self, may_record: Callable[[RequestState], bool]) -> None:
        """Queue requests that lack a slot, and give free slots to the queue.

        Args:
            may_record: Returns whether the next eviction of a request is worth a slot.

        """
        asking, self._asking = self._asking, {}
        if self.slots is None:
            return
        for state in asking.values():
            if state.phase is not Phase.NEAR or state.ring is not None:
                continue
            if state.needs.window == "required":
                if may_record(state):
                    self.waiting[state.request_id] = state
                    self.near.pop(state.request_id, None)
                else:
                    self._asking[state.request_id] = state
            elif (
                state.needs.window == "optional"
                and state.reads_window(state.next_eviction)
                and self.free_slots
            ):
                self._record(state)
        while self.waiting and self.slots.num_free:
            state = self.waiting.pop(next(iter(self.waiting)))
            if state.phase is Phase.NEAR:
                self.near[state.request_id] = state
            self._record(state)

    def _record(self, state: RequestState) -> None:
        assert self.slots is not None
        state.ring = self.slots.pop()
        state.recorded_from = state.request.num_computed_tokens
        self._recording[state.request_id] = state

    def finish_step(self, state: RequestState, end: int) -> None:
        """Record that a step ends at ``end``, and return the slot if no group still needs it.

        A request with consecutive windows gives its slot to the queue between them, because it
        would otherwise hold the slot until it ends.
        """
        quiet = not state.observes(end + 1)
        if quiet or (state.evicted_at == end and self.waiting and not state.in_prefill(end + 1)):
            self._give_back(state)
        if state.phase is Phase.PREFILL and end >= state.prefill_end:
            self._table.end_prefill(state)
            if state.ring is not None:
                self._recording[state.request_id] = state
            self._sleep(state, state.quiet_until - end + 1)
        elif state.phase is Phase.NEAR:
            if quiet:
                del self.near[state.request_id]
                state.phase = Phase.QUIET
                self._sleep(state, state.quiet_until - end + 1)
            elif state.evicted_at == end:
                # It goes behind all others, so that short intervals take no turns from long ones.
                self.near[state.request_id] = self.near.pop(state.request_id)
                if state.ring is None:
                    self._asking[state.request_id] = state

    def _sleep(self, state: RequestState, tokens: int) -> None:
        if state.quiet_until < sys.maxsize:
            self._wakeups.sleep(state, tokens)

    def _give_back(self, state: RequestState) -> None:
        self.waiting.pop(state.request_id, None)
        self._recording.pop(state.request_id, None)
        if state.ring is not None and self.slots is not None:
            self.slots.give_back(state.ring)
            state.ring = None

    def leave(self, state: RequestState) -> None:
        """Forget a request before its blocks are freed."""
        self.near.pop(state.request_id, None)
        self._asking.pop(state.request_id, None)
        self._wakeups.cancel(state)
        self._give_back(state)
