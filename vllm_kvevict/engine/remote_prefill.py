"""Prompts that a connector loads or saves: what is computed again, and what is never saved.

vLLM computes one token after a load, so the queries of the observation window would be missing.
A loaded prompt therefore continues at the observation window (:attr:`RequestState.load_cap`): the
last tokens, 32 unless configured otherwise, are computed over the loaded blocks. A prefix-cache
hit ends at a full block; a load fills the request's own blocks and may end inside one. The load
itself is never shortened, because point-to-point connectors pair the blocks of both servers from
the end.

vLLM publishes the blocks of an asynchronous load when it is complete, and those of a synchronous
load when the request is scheduled. The first can be limited to the tokens before an eviction
point; the second cannot, so requests with eviction points load nothing synchronously.

Some connectors save what a request computes under a hash of its tokens. Tokens that were computed
over an evicted cache must not be saved so, and the block table of an evicted request no longer
holds its prompt. Such a request is therefore hidden from the connector. So is a request with a
cache salt, a LoRA adapter or embeddings in its prompt: its tokens alone do not say what it
computes, or for whom, and another salt or adapter must not find it.

A synchronous load may fail after the prompt was evicted, and after other requests hit its blocks.
All requests that computed over them then end (:mod:`vllm_kvevict.engine.lost_blocks`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_kvevict.config.connectors import LMCACHE, NIXL, SAVING
from vllm_kvevict.config.handover import hands_over
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.lost_blocks import LoadsInFlight
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.rules.step_plan import STEPS_AHEAD

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request


UNTRIED = "this has not been tested"

LMCACHE_REFUSED = {
    "enable_async_loading": UNTRIED,
    "enable_blending": UNTRIED,
    "enable_pd": UNTRIED,
    "use_layerwise": UNTRIED,
    "save_unfull_chunk": "LMCache does not report every such chunk that it could not load",
}
"""Settings of LMCache that cannot be used together with eviction, and why.

After a hit of h tokens, LMCache loads from the chunk that contains token h on, and reports a load
that brought fewer than n - h tokens, for n tokens that it has. If only the last chunk is missing
and shorter than the hit reaches into the first one, the others bring enough.
"""


class RemotePrefill(Part):
    """Decides what of a prompt is loaded, and what is computed again after the load.

    Args:
        core: The engine core.
        stores: The stores that requests share.
        connector: A connector in its scheduler that loads whole prompts.
        name: Its name in ``--kv-transfer-config``.

    Raises:
        ValueError: The configuration of LMCache is not supported; the message is one sentence.

    """

    def __init__(
        self,
        core: EvictionCore,
        stores: PublishedStores,
        connector: "KVConnectorBase_V1",
        name: str | None,
    ) -> None:
        self._table, self._cache, self._stores = core.table, core.cache, stores
        self.loads = LoadsInFlight(core)
        self.saves = name in SAVING
        """True if the connector saves what requests compute, by their tokens."""
        self._transfers = name in NIXL
        if name == LMCACHE:
            _check_lmcache(connector)
        match = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(
            request: "Request", num_computed_tokens: int
        ) -> tuple[int | None, bool]:
            if self.saves and (_is_partitioned(request) or self._hides(request.request_id)):
                # LMCache keeps what a look-up finds in memory until it sees the request in a step.
                return 0, False
            found, is_async = match(request, num_computed_tokens)
            if found and not self._may_load(request, num_computed_tokens, is_async):
                return 0, False
            return found, is_async

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def _may_load(self, request: "Request", num_computed_tokens: int, is_async: bool) -> bool:
        """Return whether a request loads tokens after a hit of ``num_computed_tokens``.

        The connector learns from ``update_state_after_alloc`` with 0 tokens that nothing is loaded,
        and a point-to-point connector then lets the other server free its blocks.
        """
        state = self._table.states.get(request.request_id)
        if state is None:
            return True
        if state.pending_store is not None or (not is_async and state.has_eviction_points):
            return False
        # At least one token is computed, and vLLM would look up a request again that continues at
        # token 0.
        return min(state.hit_cap, request.num_tokens - 1) > num_computed_tokens

    def hands_over(self, request: "Request") -> bool:
        """Return whether another server reads the blocks of a request's prompt."""
        return self._transfers and hands_over(request.kv_transfer_params)

    def replayed(self, request: "Request", num_hit_tokens: int) -> int:
        """Return how many of the last ``num_hit_tokens`` tokens are computed again.

        Args:
            request: A request that is admitted now, or whose load is complete.
            num_hit_tokens: Tokens that were found in the cache or loaded.

        """
        state = self._table.states.get(request.request_id)
        if state is None or not state.evicts or state.pending_store is not None:
            return 0
        start = min(num_hit_tokens, state.load_cap)
        state.replayed_from, state.replayed_until = start, num_hit_tokens
        return num_hit_tokens - start

    def rewind(self, request: "Request") -> None:
        """Limit the tokens of a completed load before vLLM publishes its blocks.

        A load that failed has no tokens, or those before the first missing block.
        """
        state = self._table.states.get(request.request_id)
        if state is not None and state.evicts:
            request.num_computed_tokens = min(request.num_computed_tokens, state.load_cap)

    def scheduled(self, scheduler_output: "SchedulerOutput") -> None:
        """Record that a step was scheduled, and tell the workers how many it does not know of."""
        if self.saves:
            setattr(scheduler_output, STEPS_AHEAD, len(self.loads))
        self.loads.scheduled(scheduler_output)

    def lost(self, invalid_block_ids: set[int]) -> set[str]:
        """Return the requests that must end because blocks could not be loaded.

        These blocks, and all that were computed over them, leave the prefix cache, and stores that
        contain one of them are never found again.

        Args:
            invalid_block_ids: Reported for the step that is being processed.

        """
        requests, wrong = self.loads.depending(invalid_block_ids)
        self._stores.drop_containing(wrong)
        self._cache.evict_blocks(wrong)
        return requests

    def visible(self, scheduler_output: "SchedulerOutput") -> "SchedulerOutput":
        """Return the step without the requests that a connector must not save.

        Finished and preempted requests stay visible, so that the connector forgets them.

        A step may end inside the window that is computed again. LMCache loads no more than the
        tokens up to the end of the step, and the others would be missing. It is therefore told what
        vLLM would schedule without the window: at least one token behind the load.

        Args:
            scheduler_output: The scheduled step, before its evictions are planned.

        """
        scheduled = scheduler_output.num_scheduled_tokens
        hidden = {r for r in scheduled if self._hides(r)}
        longer = {}
        for new in scheduler_output.scheduled_new_reqs:
            state = self._table.states.get(new.req_id)
            if state is not None and state.evicts and new.req_id not in hidden:
                behind = state.replayed_until + 1 - new.num_computed_tokens
                if behind > scheduled[new.req_id]:
                    longer[new.req_id] = behind
        if not hidden and not longer:
            return scheduler_output
        tokens = {r: n for r, n in (scheduled | longer).items() if r not in hidden}
        return replace(
            scheduler_output,
            scheduled_new_reqs=[
                new for new in scheduler_output.scheduled_new_reqs if new.req_id not in hidden
            ],
            scheduled_cached_reqs=_without(scheduler_output.scheduled_cached_reqs, hidden),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
        )

    def _hides(self, request_id: str) -> bool:
        """Return whether a request computes, or reads, something else than its tokens alone say.

        A request with eviction points counts from its start: a connector may save a prompt in the
        first step, before the point is reached. So does a request that was preempted: LMCache
        expects it to continue where the load ends, but its window is computed again.
        """
        state = self._table.states.get(request_id)
        if state is None:
            return False
        if _is_partitioned(state.request):
            return True
        if not state.evicts:
            return False
        if state.request.num_preemptions:
            return True
        store = state.pending_store or state.base_store
        return store is not None or state.has_eviction_points or state.computed_valid is not None


def _is_partitioned(request: "Request") -> bool:
    """Return whether the prefix cache separates a request from others with the same tokens.

    Pictures and sounds are not asked for: connectors hash them with the tokens.
    """
    return (
        bool(request.cache_salt)
        or request.lora_request is not None
        or request.prompt_embeds is not None
    )


def _check_lmcache(connector: Any) -> None:
    """Refuse settings that LMCache reads from its own file or environment variables."""
    settings = getattr(connector._lmcache_engine, "config", None)
    for name, why in LMCACHE_REFUSED.items():
        if getattr(settings, name, False):
            raise ValueError(
                f"KV eviction does not support {name} of LMCache, because {why}; remove it from "
                "LMCache's configuration."
            )


def _without(cached: "CachedRequestData", hidden: set[str]) -> "CachedRequestData":
    """Return the data of running requests without the hidden ones."""
    rows = [row for row, request_id in enumerate(cached.req_ids) if request_id not in hidden]
    return replace(
        cached,
        req_ids=[cached.req_ids[row] for row in rows],
        resumed_req_ids=cached.resumed_req_ids - hidden,
        new_token_ids=[cached.new_token_ids[row] for row in rows] if cached.new_token_ids else [],
        all_token_ids={r: ids for r, ids in cached.all_token_ids.items() if r not in hidden},
        new_block_ids=[cached.new_block_ids[row] for row in rows],
        num_computed_tokens=[cached.num_computed_tokens[row] for row in rows],
        num_output_tokens=[cached.num_output_tokens[row] for row in rows],
    )
