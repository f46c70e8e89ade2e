"""Which requests would make the same store."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.shared_store import ShareKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


def share_key(
    request: "Request", entry: Entry, hash_block_size: int, prepare: tuple[int, ...]
) -> ShareKey | None:
    """The key of a request that evicts at a point of its own; None for all others.

    Args:
        request: vLLM's request, whose blocks are hashed as far as they are full.
        entry: Its entry before anything was evicted.
        hash_block_size: Tokens that one of these hashes covers.
        prepare: Tokens that read its context before it is evicted; empty for none.

    """
    point = entry.stop(0)
    if point is None or point >= request.num_tokens:
        return None
    blocks = point // hash_block_size
    if not 0 < blocks <= len(request.block_hashes) or not _looks_behind(entry, point):
        return None
    hashed = blocks * hash_block_size
    extra = None
    if hashed < point:
        extra = generate_block_hash_extra_keys(request, hashed, point, 0)[0]
    stores = tuple(
        (group, timeline.wanted(point) if timeline.is_due(point) else 0)
        for group, timeline in sorted(entry.timelines.items())
    )
    return ShareKey(
        prefix=request.block_hashes[blocks - 1],
        rest=tuple(request.all_token_ids[hashed:point]),
        extra=extra,
        point=point,
        policy=entry.policy,
        protect_first=entry.protect_first,
        stores=stores,
        # Where nothing is evicted, nothing is to be prepared.
        prepare=prepare if any(blocks for _, blocks in stores) else (),
    )


def _looks_behind(entry: Entry, point: int) -> bool:
    """Whether later evictions look at queries from ``point`` on alone, which everyone computes."""
    for timeline in entry.timelines.values():
        rule, due = timeline.timeline, timeline.due
        if timeline.is_due(point):
            later = replace(timeline)
            later.evict(point)
            due = point + rule.stride if rule.stride else None
            if later.point != point:
                due = later.point
        if due is not None and due - rule.window < point:
            return False
    return True
