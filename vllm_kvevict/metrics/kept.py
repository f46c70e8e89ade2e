"""The share of its tokens that a request kept."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvevict.timeline.progress import EvictionProgress


def kept_share(
    timelines: "Mapping[int, EvictionProgress]", layers: Mapping[int, int], tokens: int
) -> float:
    """Return the share of its tokens that a request holds, averaged over KV heads and layers.

    Args:
        timelines: The request's progress by KV-cache group; a group without an entry keeps all
            tokens.
        layers: Layers of every evictable group, by group.
        tokens: Number of tokens with computed keys and values, at least 1.

    Returns:
        A share in (0, 1]; 1 if nothing was evicted.

    """
    held = 0
    for group, count in layers.items():
        timeline = timelines.get(group)
        if timeline is None or not timeline.evicted:
            held += count * tokens
        else:
            store = timeline.store_blocks * timeline.rule.block_size
            held += count * (store + tokens - timeline.tail_start)
    return held / (tokens * sum(layers.values()))
