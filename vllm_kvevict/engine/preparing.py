"""Requests of the engine's own, which read a context that others will reuse compressed."""

from collections.abc import Sequence
from dataclasses import replace

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import Preparation, RequestState
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.settings.requests import PREPARING_ANSWERS
from vllm_kvevict.stores.key import ShareKey

MOST = 2
"""Preparations that a request waits for; then it goes on without."""

MOST_UNDER_WAY = 8
"""Preparations that run at once; other contexts wait for their turn."""


class Preparations:
    """Has stores prepared that waiting requests ask for, one for each key.

    A preparing request is one of vLLM's: its prompt is the context and what reads it, it evicts at
    its prompt's end what an eviction at the context's end would, publishes that, and ends. No
    client waits for its tokens, so the front end drops them. It ends early when those that asked
    for it are gone.

    Args:
        core: What the engine works on, to whose scheduler preparing requests are added.
        stores: Published stores.
        watermark: Blocks that admissions leave free by vLLM's own flag.

    """

    def __init__(self, core: EvictionCore, stores: PublishedStores, watermark: int) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._table = core.table
        self._stores = stores
        self._watermark = watermark
        self._counters = core.counters
        self._by_key: dict[ShareKey, Preparation] = {}
        self.blocked = 0
        """Requests that the coming step cannot admit: what they wait for is not ready."""

    def ask(self, state: RequestState) -> None:
        """Note a request that waits, whose context may have to be prepared."""
        if state.options.prepare is None or state.preparations_awaited > MOST:
            return
        if state.key is None:
            self._give_up(state, failed=bool(state.due_groups(state.options.at or 0)))
        elif state.key.prepare:
            state.preparation = self._by_key.setdefault(state.key, Preparation(state.key))
            state.preparation.askers[state.request_id] = state

    def leave(self, states: Sequence[RequestState]) -> None:
        """Note requests that wait no more: they are admitted, or gone."""
        for state in states:
            if state.preparation is not None:
                del state.preparation.askers[state.request_id]
                state.preparation = None

    def begin_step(self) -> None:
        """Before a step is scheduled: end what nobody waits for, and start what requests need."""
        requests = self._scheduler.requests
        running = 0
        for key, asked in list(self._by_key.items()):
            if asked.made_by is not None and asked.made_by not in requests:
                asked.made_by = None
            if not asked.askers:
                del self._by_key[key]
                if asked.made_by is not None:
                    self._scheduler.finish_requests(asked.made_by, RequestStatus.FINISHED_ABORTED)
            running += asked.made_by is not None
        for key, asked in self._by_key.items():
            asked.ready = self._stores.has(key)
            if asked.ready or self._stores.coming(next(iter(asked.askers.values()))):
                continue
            if asked.made_by is None and running < MOST_UNDER_WAY:
                self._try(key, asked)
                running += asked.made_by is not None
        self.blocked = sum(len(one.askers) for one in self._by_key.values() if not one.ready)

    def _try(self, key: ShareKey, asked: Preparation) -> None:
        """Prepare once more, for the requests that have not waited often enough."""
        for state in list(asked.askers.values()):
            state.preparations_awaited += 1
            if state.preparations_awaited > MOST:
                self._give_up(state, failed=True)
        asker = next(iter(asked.askers.values()), None)
        if asker is None:
            return
        preparing = self._request(asker, key)
        end = preparing.num_prompt_tokens
        options = replace(asker.options, at=end, interval=0, prepare=None, context=key.point)
        state = self._table.add(preparing, options)
        state.key = key
        if not self._core.fits(state, self._watermark):
            self._table.remove(state.request_id)
            for state in list(asked.askers.values()):
                self._give_up(state, failed=True)
            return
        asked.made_by = preparing.request_id
        self._counters.preparations += 1
        self._counters.tokens_prepared += end
        self._scheduler.add_request(preparing)

    def _request(self, asker: RequestState, key: ShareKey) -> Request:
        request = asker.request
        return Request(
            request_id=f"{request.request_id}-prepare-{self._counters.preparations + 1}",
            prompt_token_ids=[*request.all_token_ids[: key.point], *key.prepare],
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

    def _give_up(self, state: RequestState, failed: bool) -> None:
        """Let a request go on without; ``failed`` unless there is nothing to prepare."""
        self.leave([state])
        state.preparations_awaited = MOST + 1
        self._counters.preparations_failed += failed
