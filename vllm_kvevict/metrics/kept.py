"""How much of a request eviction kept."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvevict.timeline.progress import EvictionProgress


def kept_share(
    timelines: "Mapping[int, EvictionProgress]", layers: Mapping[int, int], tokens: int
) -> float:
    """Share of its cached tokens that a request holds, averaged over KV heads and layers.

    Args:
        timelines: The request's timelines by KV-cache group; a group without one keeps all.
        layers: Layers of every evictable group, by group.
        tokens: Tokens whose keys and values were computed, at least 1.

    Returns:
        In (0, 1]; 1 where nothing was evicted.

    """
    held = 0
    for group, count in layers.items():
        timeline = timelines.get(group)
        if timeline is None or not timeline.evicted:
            held += count * tokens
        else:
            store = timeline.store_blocks * timeline.timeline.block_size
            held += count * (store + tokens - timeline.tail_start)
    return held / (tokens * sum(layers.values()))
