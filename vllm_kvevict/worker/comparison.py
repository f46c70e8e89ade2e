"""What an eviction lost: the replay's next tokens beside those of the cache before it."""

from collections.abc import Callable

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.timeline.step_plan import HiddenStateSpan, Replay, StepPlan
from vllm_kvevict.worker.runners import RunnerRows, released_requests

ROWS = 8
"""Positions that are compared at once: a vocabulary of 152,000 takes 3 MB for each, some five
times, which vLLM has not set aside."""


def divergence(full: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    """KL divergence of next tokens, and whether the likeliest one is the same.

    Args:
        full: [N, V] logits over the cache before the eviction.
        replayed: [N, V] logits over what it left.

    Returns:
        [N, 2] float32: nats, ``sum(p * log(p / q))`` with p of ``full``; 1 or 0.

    """
    p, q = full.float().log_softmax(-1), replayed.float().log_softmax(-1)
    # Tokens that a model never says have no logarithm on either side.
    nats = torch.where(p > float("-inf"), p.exp() * (p - q), 0.0).sum(-1)
    return torch.stack([nats, (full.argmax(-1) == replayed.argmax(-1)).float()], dim=-1)


class Comparison:
    """Keeps the last hidden states of some requests, and compares those of replays with them.

    All ranks do the same, since the logits of a vocabulary that is spread over ranks need all.

    Args:
        rows: Adapter of the model runner.
        window: w, positions that are kept of a request.
        logits: Logits [N, V] of hidden states [N, D]; None on ranks that do not have them.
        report: Takes a replay and the mean [2] of its :func:`divergence`, still on the device.

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
        self._heard: dict[str, torch.Tensor] = {}
        """[w, D] by request: position p in row p % w."""
        self._full: dict[str, torch.Tensor] = {}
        """The same by replay, of the request that it replays."""

    def begin_step(self, scheduler_output: SchedulerOutput, plan: StepPlan) -> None:
        """Before the forward pass: forget requests that are gone."""
        self._plan = plan
        for request_id in (*released_requests(scheduler_output), *plan.dropped):
            self._heard.pop(request_id, None)
            self._full.pop(request_id, None)

    def hear(self, scheduler_output: SchedulerOutput) -> None:
        """After the forward pass, and before the runner lets go of it: keep hidden states."""
        if not self._plan.hidden_states:
            return
        hidden, starts = self._rows.hidden_states(scheduler_output)
        for request_id, heard in self._plan.hidden_states.items():
            first = starts[request_id] + heard.first - heard.start
            self._keep(request_id, heard, hidden[first : first + heard.end - heard.first])

    def _keep(self, request_id: str, heard: HiddenStateSpan, hidden: torch.Tensor) -> None:
        window = self._window
        if request_id not in self._heard:
            self._heard[request_id] = hidden.new_zeros(window, hidden.shape[1])
        kept, row = self._heard[request_id], heard.first % window
        before = min(len(hidden), window - row)
        kept[row : row + before] = hidden[:before]
        kept[: len(hidden) - before] = hidden[before:]

    def end_step(self) -> None:
        """After the step's evictions: set aside what replays will be compared with, and compare."""
        plan, self._plan = self._plan, StepPlan()
        for replay in plan.replays:
            heard = self._heard.pop(replay.of, None)
            if heard is not None:
                self._full[replay.request_id] = heard
        for replay in plan.compared:
            full, again = (of.pop(replay.request_id, None) for of in (self._full, self._heard))
            if full is None or again is None:
                # A step failed in between.
                continue
            count = replay.end - replay.start
            rows = [one.roll(-(replay.start % self._window), 0)[:count] for one in (full, again)]
            found = [
                divergence(*logits.chunk(2))
                for both in zip(*(one.split(ROWS) for one in rows), strict=True)
                if (logits := self._logits(torch.cat(both))) is not None
            ]
            if found:
                self._report(replay, torch.cat(found).mean(0))
