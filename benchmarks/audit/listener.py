"""What an engine in this process tells: its audits, and the logits of chosen positions."""

from typing import Any

import torch


def number(request_id: str) -> int:
    """The number that ``LLM`` gave a request; the engine adds a suffix to it."""
    return int(request_id.split("-")[0])


def own(request_id: str) -> bool:
    """Whether the engine made this request, and not a client."""
    return "-audit-" in request_id


class Listener:
    """Listens to the scheduler and to the worker of a ``vllm.LLM`` in this process.

    Args:
        llm: The engine, with eviction and audits.

    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.counters = core.scheduler.eviction_counters
        self.audits: dict[int, list[Any]] = {}
        """Audits of each request by its number, as reports have them."""
        self.logits: dict[int, dict[int, torch.Tensor]] = {}
        """[V] float32 logits by request number and position."""
        self.first: int | None = None
        """From this position on, logits are kept; None for none."""
        worker = core.model_executor.driver_worker.worker
        self._eviction, self._model = worker.kv_eviction, worker.model_runner.get_model()
        self._measured = core.scheduler._reporter.measured
        core.scheduler._reporter.measured = self._note
        self._end_step = self._eviction.end_step
        self._eviction.end_step = self._hear

    def clear(self) -> None:
        self.audits.clear()
        self.logits.clear()

    def _note(self, **values: Any) -> None:
        for audit in values.get("audits", ()):
            self.audits.setdefault(number(audit[0]), []).append(audit)
        self._measured(**values)

    def _hear(self, output: Any, run: bool = True) -> None:
        if run and self.first is not None and output.total_num_scheduled_tokens:
            self._keep(output, self.first)
        self._end_step(output, run=run)

    def _keep(self, output: Any, wanted: int) -> None:
        """After a forward pass: logits of all positions from ``wanted`` on."""
        hidden, rows = self._eviction._rows.hidden_states(output)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, start in computed.items():
            end = start + output.num_scheduled_tokens[request_id]
            if own(request_id) or end <= wanted:
                continue
            first = max(start, wanted)
            row = rows[request_id] + first - start
            logits = self._model.compute_logits(hidden[row : row + end - first]).float()
            mine = self.logits.setdefault(number(request_id), {})
            mine.update(zip(range(first, end), logits.clone(), strict=True))
