"""The contract of an optional part of the scheduler."""

from collections.abc import Mapping

from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.rules.step_plan import StepPlan


class Part:
    """An optional feature that the scheduler calls at fixed points of a request and of a step.

    A part is constructed after the core of the engine, in the order of
    :func:`~vllm_kvevict.engine.scheduler.build_parts`, and is called in that order. Every method
    does nothing by default.
    """

    def arrived(self, state: RequestState) -> None:
        """Called when a client's request has arrived and is about to wait."""

    def looked_up(self, state: RequestState) -> None:
        """Called after the stores and the prefix cache were searched for a waiting request."""

    def before_schedule(self) -> None:
        """Called before vLLM schedules a step."""

    def before_plan(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Called when a step is scheduled, before its evictions are planned.

        Args:
            num_scheduled_tokens: Tokens that each request computes in the step, by request id.

        """

    def plan(self, plan: StepPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Add to the plan of a step that already contains its evictions.

        Args:
            plan: Changed in place.
            num_scheduled_tokens: As for :meth:`before_plan`.

        """

    def after_step(self, plan: StepPlan) -> None:
        """Called when the output of a step was processed and the freed blocks are in the pool."""

    def let_go(self, state: RequestState) -> bool:
        """Release blocks that the part shares with a request, so that its eviction gains blocks.

        Returns:
            Whether any block was released.

        """
        return False

    def before_preemptions(self) -> None:
        """Called before running requests are preempted between two steps."""

    def before_reset(self, running: bool) -> None:
        """Called before the prefix cache is reset.

        Args:
            running: True if running requests are preempted for the reset.

        """
