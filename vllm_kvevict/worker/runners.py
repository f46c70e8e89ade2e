"""State rows of requests: one adapter for each of vLLM's model runners."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput


def released_requests(scheduler_output: SchedulerOutput) -> list[str]:
    """Return the ids of requests that ended or were preempted since the last step."""
    preempted = scheduler_output.preempted_req_ids or ()
    return [*scheduler_output.finished_req_ids, *preempted]


class RunnerRows(Protocol):
    """The state row of every request that the worker holds."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> list[int]:
        """Follow the scheduler, and return the rows to clear before the step runs."""

    def rows(self, request_ids: Iterable[str]) -> np.ndarray:
        """Return the rows [K] int64 of scheduled requests."""

    def batch_rows(self, common: CommonAttentionMetadata) -> np.ndarray:
        """Return the rows [R] int64 of the current batch, in batch order."""

    def hidden_states(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[torch.Tensor, dict[str, int]]:
        """Return the last hidden states [N, D] of the step and each request's first index.

        They are available between the forward pass and sampling.
        """

    def positions(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        """Return the positions, [N] or [3, N] int64, that the rotary module gets for tokens."""


class RowsV1:
    """Rows under Model Runner V1, which moves requests between batch positions.

    This class assigns the rows. In vLLM 0.32.0, ``GPUModelRunner.input_batch.req_ids`` lists the
    batch in order from ``_update_states`` on. No step releases sessions of streaming input that
    wait for their next input, and vLLM may run ``num_rows`` requests in addition to them. Such
    sessions are never evicted, so their rows hold no state and other requests may use them.

    Args:
        runner: vLLM's model runner.
        num_rows: Maximum number of requests that run at once.
        evicted: Returns True if the request of a row was evicted.

    """

    def __init__(self, runner: Any, num_rows: int, evicted: Callable[[int], bool]) -> None:
        self._runner = runner
        self._evicted = evicted
        self._free = list(range(num_rows - 1, -1, -1))
        self._row: dict[str, int] = {}
        self._without: set[str] = set()
        """Requests that hold no row, because it was lent to another request."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> list[int]:
        for request_id in released_requests(scheduler_output):
            row = self._row.pop(request_id, None)
            self._without.discard(request_id)
            if row is not None:
                self._free.append(row)
        scheduled = scheduler_output.num_scheduled_tokens
        cleared = []
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (
            *(request.req_id for request in scheduler_output.scheduled_new_reqs),
            *resumed,
            *(request_id for request_id in self._without if request_id in scheduled),
        ):
            if request_id not in self._row:
                self._row[request_id] = self._free.pop() if self._free else self._lent(scheduled)
            cleared.append(self._row[request_id])
        self._without -= self._row.keys()
        return cleared

    def _lent(self, scheduled: Mapping[str, int]) -> int:
        """Take the row of a request that the step does not run and that was never evicted."""
        idle = next(
            request_id
            for request_id, row in self._row.items()
            if request_id not in scheduled and not self._evicted(row)
        )
        self._without.add(idle)
        return self._row.pop(idle)

    def rows(self, request_ids: Iterable[str]) -> np.ndarray:
        return np.fromiter(map(self._row.__getitem__, request_ids), dtype=np.int64)

    def positions(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        index = torch.arange(start, stop, device="cpu")
        request = self._runner.requests[request_id]
        if request.mrope_positions is None:
            return index
        prompt = request.mrope_positions.shape[1]
        in_prompt = request.mrope_positions[:, start : min(stop, prompt)].cpu()
        later = index[max(0, prompt - start) :] + (request.mrope_position_delta or 0)
        return torch.cat([in_prompt, later.expand(len(in_prompt), -1)], dim=1)

    def hidden_states(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[torch.Tensor, dict[str, int]]:
        return self._runner.execute_model_state.hidden_states, _starts(
            self._runner.input_batch.req_ids, scheduler_output
        )

    def batch_rows(self, common: CommonAttentionMetadata) -> np.ndarray:
        request_ids = self._runner.input_batch.req_ids
        rows = itemgetter(*request_ids)(self._row)
        return np.atleast_1d(np.array(rows, dtype=np.int64))


class RowsV2:
    """Rows under Model Runner V2, which assigns every request a fixed index.

    In vLLM 0.32.0, the indices are in ``req_states.req_id_to_index``, and the batch is an argument
    of ``model_state.prepare_attn``, which builds a step's metadata. The metadata themselves name
    the requests only in models without recurrent layers.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._index = runner.req_states.req_id_to_index
        self._batch: np.ndarray | None = None
        prepare = runner.model_state.prepare_attn

        @wraps(prepare)
        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = input_batch.idx_mapping_np
            return prepare(input_batch, *args, **kwargs)

        runner.model_state.prepare_attn = prepare_attn

    def begin_step(self, scheduler_output: SchedulerOutput) -> list[int]:
        released = map(self._index.get, released_requests(scheduler_output))
        return [row for row in released if row is not None]

    def rows(self, request_ids: Iterable[str]) -> np.ndarray:
        return np.fromiter(map(self._index.__getitem__, request_ids), dtype=np.int64)

    def positions(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device="cpu")

    def hidden_states(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[torch.Tensor, dict[str, int]]:
        state = self._runner.execute_model_state
        return state.hidden_states, _starts(state.input_batch.req_ids, scheduler_output)

    def batch_rows(self, common: CommonAttentionMetadata) -> np.ndarray:
        assert self._batch is not None
        return np.asarray(self._batch, dtype=np.int64)


def _starts(request_ids: Iterable[str], scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Return the index of each request's first token in a batch of this order."""
    starts, start = {}, 0
    for request_id in request_ids:
        starts[request_id] = start
        start += scheduler_output.num_scheduled_tokens[request_id]
    return starts
