"""The share of its tokens that a request kept."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvevict.rules.progress import EvictionProgress


def kept_share(
    progress: "Mapping[int, EvictionProgress]", layers: Mapping[int, int], tokens: int
) -> float:
    """Return the share of its tokens that a request holds, averaged over KV heads and layers.

    Args:
        progress: The request's progress by KV-cache group; a group without an entry keeps all
            tokens.
        layers: Layers of every evictable group, by group.
        tokens: Number of tokens with computed keys and values, at least 1.

    Returns:
        A share in (0, 1]; 1 if nothing was evicted.

    """
    held = 0
    for group, count in layers.items():
        group_progress = progress.get(group)
        if group_progress is None or not group_progress.evicted:
            held += count * tokens
        else:
            store = group_progress.store_blocks * group_progress.rule.page_tokens
            held += count * (store + tokens - group_progress.tail_start)
    return held / (tokens * sum(layers.values()))
