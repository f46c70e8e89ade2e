"""The store that a replay starts with."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.stores.key import ShareKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_kvevict.rules.progress import EvictionProgress


@dataclass(eq=False)
class Replayed(PublishedStore):
    """The blocks that an eviction left, and the positional blocks up to the first token to replay.

    The store cannot be found by its key, and its blocks carry no hash for it. It is passed to the
    replay directly.
    """

    @classmethod
    def starting_at(cls, start: int, groups: dict[int, PublishedGroup]) -> Self:
        """Return the store of a replay that starts at ``start``, the first token to replay."""
        key = ShareKey(b"", (), None, start, "", 0, ())
        return cls(key, groups, [])

    @property
    def blocks(self) -> "list[KVCacheBlock]":
        """All blocks that the replay reads."""
        return [block for blocks in self.groups.values() for block in (*blocks.store, *blocks.tail)]

    def advance(self, progress: "Mapping[int, EvictionProgress]") -> None:
        """Set the progress of the replay to the state after the eviction, with no eviction to
        follow."""
        for group, group_progress in progress.items():
            blocks = self.groups[group]
            group_progress.next_eviction = group_progress.next_prefill_eviction = None
            group_progress.no_eviction_before = sys.maxsize
            group_progress.tail_start, group_progress.store_blocks = (
                blocks.tail_start,
                len(blocks.store),
            )
            group_progress.computed_valid = self.key.point
