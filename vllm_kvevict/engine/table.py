"""All requests of an engine core, and indexes for every step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.requirements import NOTHING
from vllm_kvevict.rules.rule import EvictionRule

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestTable:
    """The state of every request, and indexes of the requests that every step reads.

    Args:
        rules: The server's eviction rule of each evictable group, by group id.
        needs: The requirements of every policy that a request may choose.
        config: The server's settings.
        max_model_len: Maximum length of a sequence in tokens.

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
        """Requests in PREFILL, in the order of admission."""
        self.accumulating: dict[str, RequestState] = {}
        """Requests that hold blocks and accumulate the attention of every query for their
        policy."""
        self.on_demand: dict[str, RequestState] = {}
        """Requests that hold blocks and evict under pressure only."""
        self.stopping: dict[str, RequestState] = {}
        """Requests with eviction points in an unfinished prefill, waiting requests included."""
        self.admitted: list[RequestState] = []
        """Requests that the current step admits."""
        self.needs = needs

    def add(self, request: "Request", options: RequestOptions) -> RequestState:
        """Return the state of a request that arrives.

        Args:
            request: vLLM's request.
            options: Settings that its client, or the engine itself, asks for.

        """
        # The prompt of a resumable session grows after decoding, which no rule can foresee.
        never = request.resumable or request.pooling_params is not None or not options.evicts
        rules = {g: options.own_rule(r) for g, r in self.rules.items()} if not never else {}
        max_length = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        needs = self.needs.get(options.policy, NOTHING) if rules else NOTHING
        state = RequestState(request, options, needs, rules, max_length)
        self.states[request.request_id] = state
        state.begin()
        self.note_stops(state)
        return state

    def admit(self, state: RequestState) -> None:
        """Record that a waiting request gets its first blocks."""
        request_id, state.phase = state.request_id, Phase.PREFILL
        self.prefilling[request_id] = state
        self.admitted.append(state)
        if state.needs.every_query:
            self.accumulating[request_id] = state
        if state.on_demand:
            self.on_demand[request_id] = state

    def end_prefill(self, state: RequestState) -> None:
        """Record that a request decodes from now on."""
        del self.prefilling[state.request_id]
        self.stopping.pop(state.request_id, None)
        state.phase = Phase.QUIET

    def note_stops(self, state: RequestState) -> None:
        # A point at the end of the prompt counts too: a preempted request also replays its answer.
        points = state.options.at is not None
        if state.rules and (points or any(r.prefill_stride for r in state.rules.values())):
            self.stopping[state.request_id] = state

    def return_to_waiting(self, request_id: str) -> None:
        """Return a request to WAITING when its blocks are freed; nothing changes if it holds
        none."""
        state = self.states.get(request_id)
        if state is None or not state.holds_blocks:
            return
        for index in (self.prefilling, self.accumulating, self.on_demand):
            index.pop(request_id, None)
        state.return_to_waiting()
        self.note_stops(state)

    def remove(self, request_id: str) -> None:
        """Remove a request after its blocks are freed."""
        self.stopping.pop(request_id, None)
        self.states.pop(request_id, None)
