"""Counters of evictions. They make it visible if eviction never ran."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvevict.rules.step_plan import GroupEviction


@dataclass(kw_only=True)
class Totals:
    """Totals over all policies.

    ``tokens_evicted`` counts cached tokens per KV head (average over heads), once per request and
    KV-cache group; blocks are vLLM's. ``evictions_in_place`` counts evictions with survivors in
    blocks of the same request, once per request and KV-cache group. ``postponed_*`` count steps in
    which an eviction was due but lacked blocks, a ring slot, or its turn; ``skipped_shared`` counts
    evictions that were deferred because other requests hold the blocks that they would free.
    ``stores_reused`` counts admissions of requests that took the store of another request's
    eviction, ``tokens_reused`` the tokens that they did not compute, and ``stores_published`` the
    stores that other requests may take. ``tokens_protected`` counts the first tokens that evicted
    requests protect, once per request. ``evictions_unscored`` counts evictions with a policy that
    failed, once per KV-cache group. ``evictions_pressure`` counts evictions of requests that evict
    under pressure only. Of the clients' requests that ended, ``requests_whole`` were never evicted
    and started with no store of another request.
    ``stores_saved`` counts stores copied to host memory or files. ``*_restored_*`` count the stores
    that were restored from there, the tokens that they represent, their bytes on all ranks, and the
    seconds of reading and copying them. ``files_refused`` counts invalid files. ``tokens_audited``
    counts tokens that replays computed again, and ``audits_dropped`` evictions of sampled requests
    without a replay.
    """

    evictions_pressure: int = 0
    blocks_freed: int = 0
    store_blocks_allocated: int = 0
    evictions_in_place: int = 0
    tokens_evicted: int = 0
    tokens_protected: int = 0
    postponed_blocks: int = 0
    postponed_ring: int = 0
    postponed_turn: int = 0
    skipped_shared: int = 0
    prefix_hits_capped: int = 0
    stores_published: int = 0
    stores_reused: int = 0
    tokens_reused: int = 0
    evictions_unscored: int = 0
    requests_whole: int = 0
    requests_evicted: int = 0
    stores_saved: int = 0
    files_refused: int = 0
    stores_restored_memory: int = 0
    stores_restored_file: int = 0
    tokens_restored_memory: int = 0
    tokens_restored_file: int = 0
    bytes_restored_memory: int = 0
    bytes_restored_file: int = 0
    seconds_restored_memory: float = 0.0
    seconds_restored_file: float = 0.0
    tokens_audited: int = 0
    audits_dropped: int = 0

    @property
    def postponed(self) -> int:
        return self.postponed_blocks + self.postponed_ring + self.postponed_turn


@dataclass
class Counters(Totals):
    """Totals since start-up, kept by the scheduler."""

    evictions_prefill: int = 0
    evictions_decode: int = 0

    @property
    def evictions(self) -> int:
        return self.evictions_prefill + self.evictions_decode

    def evicted(
        self,
        in_prefill: bool,
        on_demand: bool,
        groups: "Sequence[GroupEviction]",
        sizes: Sequence[int],
    ) -> None:
        """Count one eviction of a request.

        Args:
            in_prefill: True if the request has not computed its prompt.
            on_demand: True if memory pressure asked for the eviction.
            groups: The part of the eviction in each group.
            sizes: Tokens in a page of a store of each group.

        """
        self.evictions_prefill += in_prefill
        self.evictions_decode += not in_prefill
        self.evictions_pressure += on_demand
        for group, size in zip(groups, sizes, strict=True):
            self.store_blocks_allocated += len(group.store) - group.reused
            self.evictions_in_place += group.reused > 0
            self.tokens_evicted += group.tail_start - group.old_tail_start
            self.tokens_evicted += (len(group.old_store) - len(group.store)) * size

    def count_finished(self, evicted: bool) -> None:
        """Count a request that ended, and whether it was ever evicted."""
        if evicted:
            self.requests_evicted += 1
        else:
            self.requests_whole += 1

    def restored(self, tokens: int, num_bytes: int, from_file: bool) -> None:
        """Count a restored store that represents ``tokens`` tokens."""
        if from_file:
            self.stores_restored_file += 1
            self.tokens_restored_file += tokens
            self.bytes_restored_file += num_bytes
        else:
            self.stores_restored_memory += 1
            self.tokens_restored_memory += tokens
            self.bytes_restored_memory += num_bytes

    def restoring(self, seconds: float, from_file: bool) -> None:
        """Count the seconds of reading stores, or of copying them into the KV cache."""
        if from_file:
            self.seconds_restored_file += seconds
        else:
            self.seconds_restored_memory += seconds

    def as_dict(self) -> dict[str, float]:
        return {"evictions": self.evictions, "postponed": self.postponed, **asdict(self)}

    def line(self) -> str:
        """Return all totals as ``name=value`` pairs, for one log line."""
        return " ".join(f"{name}={round(value, 3)}" for name, value in self.as_dict().items())
