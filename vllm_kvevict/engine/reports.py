"""What the engine core tells its front end, step by step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.marks import Marks
from vllm_kvevict.engine.sharing import SharedStores
from vllm_kvevict.metrics.kept import kept_share
from vllm_kvevict.metrics.report import MEASURED, Reporter, attach
from vllm_kvevict.schedule.step_plan import StepPlan

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class StepReports:
    """Gathers what happened, and sends it with vLLM's statistics.

    Args:
        reporter: What gathers.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        layers: Layers of each of these groups.
        shared: Stores that requests take from one another.
        marks: Of free blocks, for eviction under pressure.

    """

    def __init__(
        self,
        reporter: Reporter,
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        layers: Mapping[int, int],
        shared: SharedStores,
        marks: Marks,
    ) -> None:
        self.reporter = reporter
        self._ledger = ledger
        self._managers = managers
        self._layers = dict(layers)
        self._shared = shared
        self._marks = marks

    def planned(self, plan: StepPlan) -> None:
        """Count the evictions of a plan that was just made."""
        for eviction in plan.evictions:
            entry = self._ledger.entries[eviction.request_id]
            self.reporter.evicted(eviction.policy, entry.in_prefill(eviction.num_tokens))

    def ended(self, request: "Request") -> None:
        """Note what share of its tokens a request holds, before its blocks are freed."""
        # The last sampled token was never fed back, so it is not in the cache.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if tokens > 0:
            entry = self._ledger.entries.get(request.request_id)
            timelines = entry.timelines if entry is not None else {}
            self.reporter.kept(kept_share(timelines, self._layers, tokens))

    def send(
        self,
        model_runner_output: "ModelRunnerOutput",
        outputs: "dict[int, EngineCoreOutputs]",
    ) -> None:
        """Send what happened since the last report to a front end, with vLLM's statistics."""
        measured = getattr(model_runner_output, MEASURED, None)
        if measured is not None:
            self.reporter.measured(**measured)
        marks = self._marks
        saved = sum(m.blocks_saved for m in self._managers.values())
        report = self.reporter.take(saved, marks.pressing, (marks.low, marks.high))
        if report is not None:
            report.idle_stores = self._shared.idle
            attach(report, outputs)
