"""What must hold of loads that failed: nobody is answered from them, and nobody else is ended."""

from collections import Counter, deque
from typing import Any

from vllm.v1.engine import FinishReason

from tests.engine.saving import ShadowSaving
from tests.engine.shadow import Row, ShadowWorker
from vllm_kvevict.rules.step_plan import PLAN


class Losses:
    """Asserts after every step what its report of lost blocks must have led to.

    Args:
        scheduler: The scheduler.
        worker: Knows which requests have computed over a lost block.
        pending: Steps that were scheduled and not executed.

    """

    def __init__(self, scheduler: Any, worker: ShadowWorker, pending: deque[Any]) -> None:
        self._scheduler, self._worker, self._pending = scheduler, worker, pending
        assert isinstance(worker.remote, ShadowSaving)
        self._remote = worker.remote
        self._reported: set[int] = set()
        self._suspects: dict[str, int] = {}
        """Requests that ended with an error before they computed; steps that may show why."""
        self._step: Any = None
        self._phases: dict[str, str] = {}
        self.tally: Counter[str] = Counter()

    def executed(self, output: Any) -> None:
        """A step was executed, and its report comes next."""
        self._step = output
        self._reported |= self._remote.lost
        for request_id in list(self._suspects):
            if self._affected(request_id):
                del self._suspects[request_id]
                continue
            self._suspects[request_id] -= 1
            assert self._suspects[request_id], f"{request_id} was ended, and computed over no loss"
        states = self._scheduler._table.states
        self._phases = {r: state.phase.value for r, state in states.items()}
        for request_id in output.num_scheduled_tokens:
            lost, running = self._row(request_id), states.get(request_id)
            if lost is not None and lost.lost and (running is None or not running.holds_blocks):
                self.tally["lost_left"] += 1

    def _row(self, request_id: str) -> Row | None:
        return self._worker.rows.get(request_id)

    def _affected(self, request_id: str) -> bool:
        row = self._row(request_id)
        if row is None:
            return False
        held = {block for table in (*row.tables, *row.stores) for block in table}
        return row.lost or not held.isdisjoint(self._reported)

    def answered(self, answer: Any) -> None:
        """A client gets tokens, or learns that its request ended."""
        request_id, row = answer.request_id, self._row(answer.request_id)
        if answer.finish_reason != FinishReason.ERROR:
            wrong = bool(answer.new_token_ids) and row is not None and row.lost
            assert not wrong, f"{request_id} is answered from a load that failed"
            return
        self.tally["lost"] += 1
        self.tally[f"lost_{self._phases[request_id]}"] += 1
        self.tally["lost_evicting"] += self._evicts(self._step, request_id)
        self.tally["lost_evicting_ahead"] += any(
            self._evicts(output, request_id) for output in self._pending
        )
        if not self._affected(request_id):
            self.tally["lost_ahead"] += 1
            self._suspects[request_id] = 1 + len(self._pending)

    def _evicts(self, output: Any, request_id: str) -> bool:
        plan = getattr(output, PLAN, None)
        return plan is not None and any(one.request_id == request_id for one in plan.evictions)

    def check(self) -> None:
        """The report was processed."""
        for request in self._scheduler.running:
            state, row = (
                self._scheduler._table.states[request.request_id],
                self._row(request.request_id),
            )
            if row is None or not row.lost:
                continue
            begins = any(
                new.req_id == request.request_id
                for output in self._pending
                for new in output.scheduled_new_reqs
            ) or any(
                request.request_id in output.scheduled_cached_reqs.resumed_req_ids
                for output in self._pending
            )
            assert begins, f"{state.request_id} goes on after its load failed"
