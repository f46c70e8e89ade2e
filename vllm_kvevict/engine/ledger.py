"""What the engine core knows about the eviction of each request. Counts and lengths only."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.rings import RingSlots
from vllm_kvevict.engine.turns import RingTurns
from vllm_kvevict.engine.watch import Watch
from vllm_kvevict.schedule.timeline import RequestTimeline, Timeline
from vllm_kvevict.settings.requests import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_kvevict.engine.shared_store import SharedStore


class EvictionLedger:
    """Timelines and ring slots of all admitted requests.

    Shared by the scheduler and the block managers of every evictable group. An entry lives
    from the first allocation of a request to the moment its blocks are freed, so a preempted
    request starts anew.

    Args:
        requests: vLLM's requests by id.
        rules: The timeline of each evictable group, by group id.
        rings: Ring slots, or None where no policy needs queries.
        max_model_len: Longest sequence; a request that reaches it ends.
        options: The settings of a request.
        windowless: Policies that need no queries.
        accumulating: Policies that add up the attention of every query.
        evicts_shared: Whether an eviction runs that takes more blocks than it gives back, because
            others hold what it replaces.
        tokens_a_step: Most tokens that a decoding request computes in a step.

    """

    def __init__(
        self,
        requests: "Mapping[str, Request]",
        rules: dict[int, Timeline],
        rings: RingSlots | None,
        max_model_len: int,
        options: "Callable[[Request], RequestOptions]",
        windowless: frozenset[str] = frozenset(),
        accumulating: frozenset[str] = frozenset(),
        evicts_shared: bool = False,
        tokens_a_step: int = 1,
    ) -> None:
        self.requests = requests
        self.rules = rules
        self.rings = rings
        self.max_model_len = max_model_len
        self.options = options
        self.windowless = windowless
        self.accumulating = accumulating
        self.evicts_shared = evicts_shared
        self.window = max(rule.window for rule in rules.values())
        self.turns = RingTurns(rings) if rings is not None else None
        self.entries: dict[str, Entry] = {}
        self.prefilling: dict[str, None] = {}
        """Admitted requests that have not reached the end of their prefill."""
        self.near: dict[str, Entry] = {}
        """Decoding requests whose coming step may evict or record, in the order they came near."""
        self.counting: dict[str, None] = {}
        """Admitted requests whose policy adds up the attention of every query."""
        self.on_demand: set[str] = set()
        """Admitted requests that evict under pressure only."""
        self.taking: dict[str, SharedStore] = {}
        """Stores that requests take with their first blocks, until the plan says so."""
        self._watch = Watch(tokens_a_step)
        self._called: list[str] = []

    def entry(self, request_id: str) -> Entry | None:
        """The entry of a request, as it is or would be; None for requests that never evict."""
        entry = self.entries.get(request_id)
        if entry is not None:
            return entry
        request = self.requests.get(request_id)
        entry = self.fresh_entry(request) if request is not None else None
        if entry is not None and (shared := self.taking.get(request_id)) is not None:
            entry.take(shared)
        return entry

    def fresh_entry(self, request: "Request") -> Entry | None:
        """The entry of a request of which nothing was computed; None where it never evicts."""
        if request.resumable or request.pooling_params is not None:
            # A resumable session grows its prompt after decoding, which no timeline foresees.
            return None
        options = self.options(request)
        prompt, replay = request.num_prompt_tokens, request.num_tokens
        ends, on_demand = self.longest(request), options.when == "pressure"
        return Entry(
            {
                group: RequestTimeline(
                    options.timeline(rule), prompt, replay, options.at, ends, on_demand
                )
                for group, rule in self.rules.items()
                if options.evicts
            },
            options.policy,
            options.policy not in self.windowless,
            options.protect_first,
            options.context,
            options.policy in self.accumulating,
            on_demand and options.evicts,
        )

    def admit(self, request_id: str) -> Entry | None:
        """Keep the entry of a request that gets its first blocks."""
        entry = self.entry(request_id)
        if entry is not None and request_id not in self.entries:
            self.entries[request_id] = entry
            self.prefilling[request_id] = None
            if entry.counts_attention:
                self.counting[request_id] = None
            if entry.on_demand:
                self.on_demand.add(request_id)
        return entry

    def drop(self, request_id: str) -> None:
        """Forget a request whose blocks are freed; unknown ones are fine."""
        self.taking.pop(request_id, None)
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            self.prefilling.pop(request_id, None)
            self.near.pop(request_id, None)
            self.counting.pop(request_id, None)
            self.on_demand.discard(request_id)
            self._give_back_ring(request_id, entry)

    def last_step(self, request_id: str, end: int) -> bool:
        """Whether the request surely ends with the step that ends at ``end``."""
        return end + 1 >= self.longest(self.requests[request_id])

    def longest(self, request: "Request") -> int:
        """Tokens at which a request ends at the latest."""
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def window_ready(self, entry: Entry, start: int, end: int) -> bool:
        """Whether a step over [start, end) completes the window that ends at ``end``.

        Counts a slot that a step of prefill could still take.
        """
        if not self.records(entry):
            return True
        if entry.ring is not None:
            return entry.recorded_from <= end - self.window
        assert self.turns is not None
        return entry.in_prefill(end) and self.turns.open_to_prompts and start <= end - self.window

    def records(self, entry: Entry) -> bool:
        """Whether the queries of an entry's window must be recorded."""
        return self.turns is not None and entry.needs_window

    def wants_slot(self, entry: Entry) -> bool:
        """Whether an entry near its eviction lacks a ring slot that it needs."""
        return entry.ring is None and self.records(entry)

    def observe(self, entry: Entry, start: int, end: int) -> None:
        """Give the entry a ring slot if a step of prefill over [start, end) reaches its window.

        Decoding requests get theirs in :meth:`take_turns`.
        """
        if (
            self.turns is None
            or entry.ring is not None
            or not entry.needs_window
            or not entry.observes(end)
            or not entry.in_prefill(end)
        ):
            return
        entry.ring, loser = self.turns.take_for_prompt()
        if loser is not None:
            self.entries[loser].ring = None
        # A step records its last w queries only.
        entry.recorded_from = max(start, end - self.window)

    def take_turns(self) -> None:
        """Give free ring slots to decoding requests that wait for one."""
        if self.turns is None:
            return
        for request_id, slot in self.turns.next():
            entry = self.entries[request_id]
            entry.ring = slot
            entry.recorded_from = self.requests[request_id].num_computed_tokens

    def come_near(self) -> list[str]:
        """Begin a step; returns the decoding requests that come near an eviction with it."""
        found: list[str] = []
        called, self._called = self._called, []
        for request_id in called + self._watch.next_step():
            entry = self.entries.get(request_id)
            if entry is None or request_id in self.prefilling or request_id in self.near:
                continue
            quiet = entry.quiet_until - self.requests[request_id].num_computed_tokens
            if quiet > 0:
                self._sleep(request_id, entry, quiet)
            else:
                self.near[request_id] = entry
                found.append(request_id)
        return found

    def call(self, request_id: str, entry: Entry, dues: Mapping[int, int]) -> None:
        """Let groups of a request that evicts on demand do so, each at its length.

        Its window may begin with the step that is about to be planned.
        """
        entry.call(dues)
        self._called.append(request_id)

    def settle(self, request_id: str, entry: Entry, end: int) -> None:
        """Note that a step ends at ``end``; the ring slot goes back where no group needs it on."""
        quiet = not entry.observes(end + 1)
        if quiet:
            self._give_back_ring(request_id, entry)
        if end >= entry.prefill_end and request_id in self.prefilling:
            del self.prefilling[request_id]
            if entry.ring is not None and self.turns is not None:
                self.turns.keep(request_id, entry.ring)
            self._sleep(request_id, entry, entry.quiet_until - end + 1)
        elif quiet and self.near.pop(request_id, None) is not None:
            self._sleep(request_id, entry, entry.quiet_until - end + 1)

    def _sleep(self, request_id: str, entry: Entry, tokens: int) -> None:
        if entry.quiet_until < sys.maxsize:
            self._watch.sleep(request_id, tokens)

    def hit_cap(self, request: "Request") -> int:
        """Most tokens a prefix-cache hit may cover.

        The window must be computed, and so must all that comes after an eviction point. Where
        the attention of every query counts, no query may be skipped.
        """
        entry = self.entry(request.request_id)
        if entry is None:
            return request.num_tokens
        if entry.accumulates:
            return 0
        caps = [
            t.hit_cap
            for t in entry.timelines.values()
            if (t.stops and t.point is not None) or (self.rings is not None and entry.needs_window)
        ]
        return min(caps, default=request.num_tokens)

    def hit_cap_taking(self, request: "Request") -> int:
        """Most tokens that a request may take which takes a store, what lies behind it included.

        The window of its next eviction must be computed, and one token in any case.
        """
        entry = self.entry(request.request_id)
        assert entry is not None
        return min([request.num_tokens - 1, *(t.hit_cap for t in entry.timelines.values())])

    def _give_back_ring(self, request_id: str, entry: Entry) -> None:
        if self.turns is not None:
            self.turns.leave(request_id, entry.ring)
            entry.ring = None
