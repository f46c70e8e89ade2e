"""Comparison of the next-token distributions before and after an eviction, for audits."""

from collections.abc import Callable

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.rules.step_plan import HiddenStateSpan, Replay, StepPlan
from vllm_kvevict.worker.runners import RunnerRows, released_requests

ROWS = 8
"""Positions that are compared at once. A vocabulary of 152,000 tokens takes about five buffers of
0.6 MB for each position, which vLLM's memory profile does not include."""


def divergence(full: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of next tokens, and whether their likeliest token is equal.

    Args:
        full: [N, V] logits over the cache before the eviction.
        replayed: [N, V] logits over the cache after it.

    Returns:
        [N, 2] float32: nats, ``sum(p * log(p / q))`` with p from ``full``; 1 if the likeliest
        tokens are equal, else 0.

    """
    p, q = full.float().log_softmax(-1), replayed.float().log_softmax(-1)
    # Tokens of probability 0 have a log-probability of -inf on both sides.
    nats = torch.where(p > float("-inf"), p.exp() * (p - q), 0.0).sum(-1)
    return torch.stack([nats, (full.argmax(-1) == replayed.argmax(-1)).float()], dim=-1)


class Comparison:
    """Keeps the last hidden states of some requests, and compares those of their replays with them.

    All ranks run it, because computing the logits of a vocabulary that is split over ranks is a
    collective operation.

    Args:
        rows: Adapter of the model runner.
        window: w, positions that are kept of a request.
        logits: Returns the logits [N, V] of hidden states [N, D]; None on ranks without logits.
        report: Receives a replay and the mean [2] of its :func:`divergence`, still on the device.

    """

    def __init__(
        self,
        rows: RunnerRows,
        window: int,
        logits: Callable[[torch.Tensor], torch.Tensor | None],
        report: Callable[[Replay, torch.Tensor], None],
    ) -> None:
        self._rows = rows
        self._window = window
        self._logits = logits
        self._report = report
        self._plan = StepPlan()
        self._hidden: dict[str, torch.Tensor] = {}
        """[w, D] hidden states by request: position p is in row p % w."""
        self._full: dict[str, torch.Tensor] = {}
        """[w, D] hidden states of the replayed request, by the id of the replay."""

    def begin_step(self, scheduler_output: SchedulerOutput, plan: StepPlan) -> None:
        """Drop the hidden states of released requests, before the forward pass."""
        self._plan = plan
        for request_id in (*released_requests(scheduler_output), *plan.dropped):
            self._hidden.pop(request_id, None)
            self._full.pop(request_id, None)

    def keep_hidden_states(self, scheduler_output: SchedulerOutput) -> None:
        """Keep hidden states, after the forward pass and before the runner drops them."""
        if not self._plan.hidden_states:
            return
        hidden, starts = self._rows.hidden_states(scheduler_output)
        for request_id, span in self._plan.hidden_states.items():
            first = starts[request_id] + span.first - span.start
            self._keep(request_id, span, hidden[first : first + span.end - span.first])

    def _keep(self, request_id: str, span: HiddenStateSpan, hidden: torch.Tensor) -> None:
        window = self._window
        if request_id not in self._hidden:
            self._hidden[request_id] = hidden.new_zeros(window, hidden.shape[1])
        kept, row = self._hidden[request_id], span.first % window
        before = min(len(hidden), window - row)
        kept[row : row + before] = hidden[:before]
        kept[: len(hidden) - before] = hidden[before:]

    def end_step(self) -> None:
        """Keep hidden states for new replays and compare finished ones, after the evictions."""
        plan, self._plan = self._plan, StepPlan()
        for replay in plan.replays:
            hidden = self._hidden.pop(replay.of, None)
            if hidden is not None:
                self._full[replay.request_id] = hidden
        for replay in plan.compared:
            full = self._full.pop(replay.request_id, None)
            replayed = self._hidden.pop(replay.request_id, None)
            if full is None or replayed is None:
                # A step failed in between.
                continue
            count = replay.end - replay.start
            shift = -(replay.start % self._window)
            ordered = [states.roll(shift, 0)[:count] for states in (full, replayed)]
            divergences = [
                divergence(*logits.chunk(2))
                for both in zip(*(states.split(ROWS) for states in ordered), strict=True)
                if (logits := self._logits(torch.cat(both))) is not None
            ]
            if divergences:
                self._report(replay, torch.cat(divergences).mean(0))
