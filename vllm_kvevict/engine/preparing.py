"""Requests of the engine's own, which read a context that others will take compressed."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.options import OPTIONS
from vllm_kvevict.engine.shared_store import ShareKey
from vllm_kvevict.engine.sharing import KEY, SharedStores
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.settings.requests import PREPARING_ANSWERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST = 2
"""Preparations that a request waits for; then it goes on without."""


class Preparations:
    """Has stores prepared that waiting requests ask for.

    A preparing request is one of vLLM's: its prompt is the context and what reads it, it evicts at
    its prompt's end what an eviction at the context's end would, publishes that, and ends. Nobody
    waits for its tokens, so the front end drops them.

    Args:
        requests: vLLM's requests by id.
        add: Adds a request to vLLM's scheduler.
        ledger: Timelines of all admitted requests.
        shared: Published stores.
        counters: Totals, counted here.

    """

    def __init__(
        self,
        requests: "Mapping[str, Request]",
        add: "Callable[[Request], None]",
        ledger: EvictionLedger,
        shared: SharedStores,
        counters: Counters,
    ) -> None:
        self._requests = requests
        self._add = add
        self._ledger = ledger
        self._shared = shared
        self._counters = counters
        self._asking: dict[str, int] = {}
        """Preparations that each request has waited for."""
        self._under_way: dict[ShareKey, str] = {}

    def ask(self, request: Request) -> None:
        """Note a new request, whose context may have to be prepared."""
        if self._ledger.options(request).prepare is not None:
            self._asking[request.request_id] = 0

    def begin(self) -> None:
        """Before a step is scheduled, start what waiting requests need."""
        if not self._asking:
            return
        self._asking = {r: n for r, n in self._asking.items() if r in self._requests}
        self._under_way = {k: r for k, r in self._under_way.items() if r in self._requests}
        for request_id, waited in list(self._asking.items()):
            request = self._requests[request_id]
            if request.num_computed_tokens:
                continue
            key = self._shared.key(request)
            if key is None:
                self._give_up(request_id, self._evicts(request))
            elif not key.prepare or key in self._under_way or self._shared.has(key):
                continue
            elif waited == MOST or not self._fits(key):
                self._give_up(request_id, failed=True)
            else:
                self._start(request, key)

    def waits(self, request: Request) -> bool:
        """Whether somebody is about to prepare what a waiting request asks for."""
        if request.request_id not in self._asking:
            return False
        key = self._shared.key(request)
        return key in self._under_way and not self._shared.has(key)

    def _fits(self, key: ShareKey) -> bool:
        """Whether a preparation and the two tokens that end it are no longer than the model's."""
        return key.point + len(key.prepare) + PREPARING_ANSWERS <= self._ledger.max_model_len

    def _evicts(self, request: Request) -> bool:
        """Whether a request evicts anything at its point."""
        entry, point = self._ledger.fresh_entry(request), self._ledger.options(request).at
        return entry is not None and point is not None and bool(entry.due_groups(point))

    def _give_up(self, request_id: str, failed: bool) -> None:
        """Let a request go on without; ``failed`` unless there is nothing to prepare."""
        del self._asking[request_id]
        self._counters.preparations_failed += failed

    def _start(self, request: Request, key: ShareKey) -> None:
        for other in self._asking:
            if self._shared.key(self._requests[other]) == key:
                self._asking[other] += 1
        prompt = [*request.all_token_ids[: key.point], *key.prepare]
        self._counters.preparations += 1
        preparing = Request(
            request_id=f"{request.request_id}-prepare-{self._counters.preparations}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0, max_tokens=PREPARING_ANSWERS, ignore_eos=True
            ),
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        options = replace(
            self._ledger.options(request),
            at=len(prompt),
            interval=0,
            prepare=None,
            context=key.point,
        )
        setattr(preparing, OPTIONS, options)
        setattr(preparing, KEY, key)
        self._under_way[key] = preparing.request_id
        self._add(preparing)
