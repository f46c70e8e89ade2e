"""All requests of an engine core, and what is asked about in every step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.requirements import NOTHING
from vllm_kvevict.timeline.rule import EvictionRule

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestTable:
    """The state of every request, and indexes of those that are asked about in every step.

    Args:
        rules: The server's timeline of each evictable group, by group id.
        needs: What each policy needs that a request may choose.
        config: The server's settings.
        max_model_len: Longest sequence; a request that reaches it ends.

    """

    def __init__(
        self,
        rules: dict[int, EvictionRule],
        needs: Mapping[str, Requirements],
        config: EvictionConfig,
        max_model_len: int,
    ) -> None:
        self.rules = rules
        self.config = config
        self.max_model_len = max_model_len
        self.evicts_shared = config.shared_blocks == "evict"
        self.window = max(rule.window for rule in rules.values())
        self.states: dict[str, RequestState] = {}
        self.prefilling: dict[str, RequestState] = {}
        """Those in PREFILL, in the order of admission."""
        self.accumulating: dict[str, RequestState] = {}
        """Those with blocks whose policy adds up the attention of every query."""
        self.on_demand: dict[str, RequestState] = {}
        """Those with blocks that evict under pressure only."""
        self.stopping: dict[str, RequestState] = {}
        """Those with eviction points in a prefill that is not over, waiting ones included."""
        self.admitted: list[RequestState] = []
        """Those that the step under way admits."""
        self.needs = needs

    def add(self, request: "Request", options: RequestOptions) -> RequestState:
        """The state of a request that arrives.

        Args:
            request: vLLM's request.
            options: What its client, or the engine itself, asks for.

        """
        # A resumable session grows its prompt after decoding, which no timeline foresees.
        never = request.resumable or request.pooling_params is not None or not options.evicts
        rules = {g: options.timeline(r) for g, r in self.rules.items()} if not never else {}
        longest = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        needs = self.needs.get(options.policy, NOTHING) if rules else NOTHING
        state = RequestState(request, options, needs, rules, longest)
        self.states[request.request_id] = state
        state.begin()
        self.note_stops(state)
        return state

    def admit(self, state: RequestState) -> None:
        """Note that a waiting request gets its first blocks."""
        request_id, state.phase = state.request_id, Phase.PREFILL
        self.prefilling[request_id] = state
        self.admitted.append(state)
        if state.needs.every_query:
            self.accumulating[request_id] = state
        if state.on_demand:
            self.on_demand[request_id] = state

    def end_prefill(self, state: RequestState) -> None:
        """Note that a request decodes from now on."""
        del self.prefilling[state.request_id]
        self.stopping.pop(state.request_id, None)
        state.phase = Phase.QUIET

    def note_stops(self, state: RequestState) -> None:
        # At the prompt's end, too: a preempted request replays tokens that are still to come.
        points = state.options.at is not None
        if state.rules and (points or any(r.prefill_stride for r in state.rules.values())):
            self.stopping[state.request_id] = state

    def release(self, request_id: str) -> None:
        """The blocks of a request are freed; of one that holds none, nothing changes."""
        state = self.states.get(request_id)
        if state is None or not state.holds_blocks:
            return
        for index in (self.prefilling, self.accumulating, self.on_demand):
            index.pop(request_id, None)
        state.release()
        self.note_stops(state)

    def remove(self, request_id: str) -> None:
        """Forget a request whose blocks are freed."""
        self.stopping.pop(request_id, None)
        self.states.pop(request_id, None)
