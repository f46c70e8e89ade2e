"""Requests of the engine's own, which compute the last tokens of others again over their stores.

Workers keep the hidden states of the last tokens of a drawn request before its eviction. A replay
then begins with the new store and the tail and computes these tokens again; the workers compare
the logits of both. A replay holds blocks, so it ends before its request evicts again and when
blocks are short.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_kvevict.config.audit_share import parse_share
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import REPLAY
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.published import PublishedGroup
from vllm_kvevict.engine.replayed import Replayed
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.metrics.kept import kept_share
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import Eviction, HiddenStateSpan, Replay, StepPlan

MAX_REPLAYS = 8
"""Maximum number of replays that wait or run at once. Each one holds a store, and hidden states on
every rank."""

MAX_KEPT_REQUESTS = 32
"""Maximum number of requests with hidden states kept at once: 16 MiB for w = 32 and states of 8,192
two-byte numbers."""

MAX_WAITING_STEPS = 64
"""Number of steps that a replay waits to be admitted before it is abandoned."""


@dataclass
class Waiting:
    """A replay that is neither abandoned nor finished.

    ``held`` are the blocks that must not be overwritten before the replay itself holds them.
    ``ready`` is set once all of its tokens are known. ``asked`` counts steps, and ``alone`` steps
    in which no request ran.
    """

    replay: Replay
    of: RequestState
    store: Replayed
    held: list[KVCacheBlock]
    ready: bool = False
    asked: int = 0
    alone: int = 0


class Replays(Part):
    """Samples requests, and computes the last tokens before their evictions again.

    For a sampled request, the workers keep the hidden states of the last w tokens before each
    eviction. After the eviction, an internal request computes these tokens again over what is left:
    it starts with the store and the blocks after it, like a request that reuses a published store.
    The workers compare the predictions of the next token. A replay never waits for memory, and it
    is ended, without a comparison, if its blocks are needed elsewhere.

    Args:
        core: The engine core.
        config: The server's settings, including the share of the requests to sample.
        stores: The stores that requests share.

    Raises:
        ValueError: The server cannot replay; the message is one sentence.

    """

    def __init__(self, core: EvictionCore, config: EvictionConfig, stores: PublishedStores) -> None:
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        # A replay starts with blocks of every group, and has those of evicting groups only.
        if not stores.enabled or len(groups) > len(core.managers):
            raise ValueError(
                "KV eviction: --kv-eviction-audit replays tokens over the blocks of an evicted "
                "request, which needs prefix caching, eviction in all layers, and no draft model; "
                "remove it or serve this model without --kv-eviction."
            )
        if not core.scheduler.log_stats:
            raise ValueError(
                "KV eviction: --kv-eviction-audit reports through vLLM's statistics; remove "
                "--disable-log-stats or --kv-eviction-audit."
            )
        self._core = core
        self._scheduler = core.scheduler
        self._pool = core.cache.block_pool
        self._counters = core.counters
        self._share = parse_share(config.audit)
        self._layers = {group: len(groups[group].layer_names) for group in core.managers}
        self._drawn: dict[str, RequestState] = {}
        self._step_spans: dict[str, HiddenStateSpan] = {}
        """Hidden states that the workers keep in the scheduled step."""
        self._kept_spans: dict[str, tuple[int, int]] = {}
        """Positions with hidden states on the workers, without a gap, by request."""
        self._waiting: dict[str, Waiting] = {}
        self._dropped: list[str] = []
        """Replays that the workers wait for, but that no step will contain."""
        self._made = 0

    def arrived(self, state: RequestState) -> None:
        """Decide by its id whether the request is sampled."""
        if not state.evicts or not _replayable(state):
            return
        number = int.from_bytes(sha256(state.request_id.encode()).digest()[:8], "big")
        if number < self._share * 2**64:
            state.audited = True
            self._drawn[state.request_id] = state

    def before_plan(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Choose the hidden states that the workers keep."""
        table, spans = self._core.table, {}
        for state in table.admitted:
            if (waiting := self._waiting.get(state.request_id)) is not None:
                self._free_held(waiting)
                # Admitted with its client's priority, but preempted before any client's request.
                state.request.priority = sys.maxsize
        for request_id, state in list(self._drawn.items()):
            if table.states.get(request_id) is not state:
                del self._drawn[request_id]
                self._kept_spans.pop(request_id, None)
                continue
            num_tokens = num_scheduled_tokens.get(request_id)
            if not state.holds_blocks or state in table.admitted:
                # The workers discard the hidden states of a preempted request.
                self._kept_spans.pop(request_id, None)
            full = len(self._kept_spans) >= MAX_KEPT_REQUESTS and request_id not in self._kept_spans
            if num_tokens is None or full or not state.holds_blocks:
                continue
            start = state.request.num_computed_tokens
            end = start + num_tokens
            if state.observes(end):
                first = max(start, end - table.window)
                since, until = self._kept_spans.get(request_id, (first, first))
                # Rejected drafts are computed again.
                goes_on = since <= first <= until
                self._kept_spans[request_id] = (since if goes_on else first, end)
                spans[request_id] = HiddenStateSpan(start, first, end)
        self._step_spans = spans

    def plan(self, plan: StepPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Hold the blocks that replays will read, and list the replays that end with the step."""
        plan.hidden_states, self._step_spans = self._step_spans, {}
        plan.dropped, self._dropped = self._dropped, []
        for eviction in plan.evictions:
            state = self._drawn.get(eviction.request_id)
            if state is not None:
                for group in eviction.groups:
                    # The workers keep the head split of the store for the replay.
                    group.published = True
                self._ask(plan, state, eviction)
        for request_id, waiting in self._waiting.items():
            num_tokens = num_scheduled_tokens.get(request_id)
            if num_tokens is not None:
                start, replay = waiting.store.key.point, waiting.replay
                at = self._scheduler.requests[request_id].num_computed_tokens
                plan.hidden_states[request_id] = HiddenStateSpan(
                    at, max(at, start), at + num_tokens
                )
                if at + num_tokens >= replay.end:
                    plan.compared.append(replay)
                    self._counters.tokens_audited += replay.end - start

    def _ask(self, plan: StepPlan, state: RequestState, eviction: Eviction) -> None:
        end, tails = eviction.num_tokens, [t.tail_start for t in state.progress.values()]
        start = max(end - self._core.table.window, *tails)
        since, until = self._kept_spans.get(state.request_id, (end, 0))
        incomplete = until != end or since > start
        if (
            incomplete
            or len(self._waiting) >= MAX_REPLAYS
            or state.replay_block_ids
            or self._soon(state, end)
        ):
            self._counters.audits_dropped += 1
            return
        self._made += 1
        share = kept_share(state.progress, self._layers, end)
        name = f"{state.request_id}{REPLAY}{self._made}"
        replay = Replay(name, state.request_id, eviction.policy, share, start, end)
        store = Replayed.starting_at(start, self._groups(state, start))
        self._pool.touch(store.blocks)
        state.replay_block_ids = frozenset(block.block_id for block in store.blocks)
        self._waiting[name] = Waiting(replay, state, store, store.blocks)
        plan.replays.append(replay)
        # The hidden states so far belong to the replay; those of the next eviction start after it.
        del self._kept_spans[state.request_id]

    def _groups(self, state: RequestState, start: int) -> dict[int, PublishedGroup]:
        """Return the blocks of a request that a replay from ``start`` on reads, by group."""
        groups = {}
        for group, progress in state.progress.items():
            size = self._core.managers[group].block_size
            positional = self._core.managers[group].req_to_blocks[state.request_id]
            tail = positional[progress.tail_start // size : blocks_for(start, size)]
            holding = state.holdings.get(group)
            store = holding.store if holding is not None and progress.evicted else []
            groups[group] = PublishedGroup(progress.tail_start, tuple(store), tuple(tail))
        return groups

    def after_step(self, plan: StepPlan) -> None:
        """Start the replays of evictions that have run."""
        for replay in plan.replays:
            waiting = self._waiting.get(replay.request_id)
            if waiting is None:
                continue
            # A preempted request may have lost a token that it had not read yet.
            if waiting.of.request.num_tokens < replay.end or not self._room(waiting):
                self._give_up(waiting)
            else:
                self._add(waiting)

    def _add(self, waiting: Waiting) -> None:
        of, replay = waiting.of.request, waiting.replay
        request = Request(
            request_id=replay.request_id,
            prompt_token_ids=list(of.all_token_ids[: replay.end]),
            sampling_params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            pooling_params=None,
            client_index=of.client_index,
            arrival_time=of.arrival_time,
            cache_salt=of.cache_salt,
            priority=of.priority,
        )
        # It starts with the given store: vLLM would count a look-up, and it has no hashes for one.
        request.skip_reading_prefix_cache = True
        options = replace(
            waiting.of.options, at=None, interval=0, when="always", prefill_interval=0, every=0
        )  # fmt: skip
        self._core.table.add(request, options).replay_store = waiting.store
        self._scheduler.add_request(request)
        queue = self._scheduler.waiting
        if request in queue:
            # Other requests wait for the blocks of a whole prompt; this one needs few, and holds a
            # store.
            queue.remove_request(request)
            queue.prepend_request(request)
        waiting.ready = True

    def _room(self, waiting: Waiting) -> bool:
        """Return whether there are blocks for a replay, which would be the first request to be
        preempted."""
        needs = 0
        for group, manager in self._core.managers.items():
            size = manager.block_size
            first = waiting.store.groups[group].tail_start // size
            needs += 1 + blocks_for(waiting.replay.end + 1, size) - first
        return needs <= self._core.free

    def before_schedule(self) -> None:
        """End replays that obstruct other requests, and forget finished ones."""
        for request_id, waiting in list(self._waiting.items()):
            if not waiting.ready:
                continue
            state = self._core.table.states.get(request_id)
            if state is None:
                self._remove(waiting)
            elif state.holds_blocks:
                if self._in_the_way(waiting):
                    self._give_up(waiting)
            else:
                waiting.asked += 1
                waiting.alone += not self._scheduler.running
                preempted = not waiting.held
                # If no request runs, the replay may hold the blocks that the others lack.
                late = waiting.asked > MAX_WAITING_STEPS or waiting.alone > 1
                if preempted or late or self._in_the_way(waiting) or not self._room(waiting):
                    self._give_up(waiting)

    def before_reset(self, running: bool) -> None:
        """Release all blocks, because vLLM resets the prefix cache only if no block is in use."""
        for waiting in list(self._waiting.values()):
            self._give_up(waiting)

    def let_go(self, state: RequestState) -> bool:
        """Abandon waiting replays that hold blocks of a request.

        They may be replays of another request that has the same published store.
        """
        own_ids = {
            block.block_id
            for group, manager in self._core.managers.items()
            for block in (
                *manager.req_to_blocks.get(state.request_id, ()),
                *(state.holdings[group].store if group in state.holdings else ()),
            )
        }
        obstructing = [
            waiting
            for waiting in self._waiting.values()
            if any(block.block_id in own_ids for block in waiting.held)
        ]
        for waiting in obstructing:
            self._give_up(waiting)
        return bool(obstructing)

    def _in_the_way(self, waiting: Waiting) -> bool:
        """Return whether the replayed request may evict soon; it must not share its blocks then."""
        state = waiting.of
        return state.holds_blocks and self._soon(state, state.request.num_computed_tokens)

    def _soon(self, state: RequestState, start: int) -> bool:
        """Return whether a request at ``start`` may evict within four steps, or later in its
        prompt.

        Four steps pass from the step of an eviction to that of its replay, since the async
        scheduler has one step in flight.
        """
        steps = 4 * (1 + self._scheduler.num_spec_tokens)
        return state.next_eviction <= max(start + steps, state.prefill_end)

    def _free_held(self, waiting: Waiting) -> None:
        self._pool.free_blocks(waiting.held)
        waiting.held = []

    def _give_up(self, waiting: Waiting) -> None:
        request_id = waiting.replay.request_id
        if request_id in self._scheduler.requests:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        elif not waiting.ready:
            self._dropped.append(request_id)
        self._remove(waiting)
        self._counters.audits_dropped += 1

    def _remove(self, waiting: Waiting) -> None:
        self._free_held(waiting)
        waiting.of.replay_block_ids = frozenset()
        del self._waiting[waiting.replay.request_id]


def _replayable(state: RequestState) -> bool:
    """Return whether the last tokens of a request can be computed again: it has text only, and its
    policy keeps no weights per token."""
    request = state.request
    return (
        not request.mm_features
        and request.prompt_embeds is None
        and request.lora_request is None
        and not state.needs.weighs
    )
