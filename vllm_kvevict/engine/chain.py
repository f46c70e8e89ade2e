"""The eviction points of a request whose evictions depend on its tokens alone, and their keys.

With ``--kv-eviction-every`` requests evict at fixed positions, in their prompts and in their
answers. What is kept at a position is a function of the tokens before it and of the settings. Each
store therefore continues the one before it, and another request that begins with the same tokens,
such as the next turn of a conversation, may start with any of them.
"""

from bisect import bisect_left
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvevict.rules.positions import FixedPositions
from vllm_kvevict.rules.progress import LONGEST, EvictionProgress
from vllm_kvevict.stores.key import ShareKey, link_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

    from vllm_kvevict.engine.published import PublishedGroup


@dataclass(frozen=True)
class Link:
    """A store that a request made at a position whose tokens the scheduler may not know yet.

    Args:
        point: The position.
        groups: The blocks of all groups.

    """

    point: int
    groups: "Mapping[int, PublishedGroup]"

    def is_of(self, key: ShareKey) -> bool:
        """Return whether it has the position of a key, and what the key says that it keeps."""
        evicting = dict(key.stores)
        groups = sorted((group, part) for group, part in self.groups.items() if group in evicting)
        stores = tuple((group, len(part.store)) for group, part in groups)
        tails = tuple((group, part.tail_start) for group, part in groups)
        return (self.point, stores, tails) == (key.point, key.stores, key.tails)


class Chain:
    """The stores that a request makes one after the other.

    Args:
        positions: The positions of its evictions.
        progress: Progress of the request by KV-cache group, before the first eviction.
        hash_block_size: Number of tokens that one of vLLM's hashes covers.
        policy: The policy that chooses.
        protect_first: First tokens that are always kept.
        reads_share: True if the policy's scores depend on the share of tokens that is kept.

    """

    def __init__(
        self,
        positions: FixedPositions,
        progress: "Mapping[int, EvictionProgress]",
        hash_block_size: int,
        policy: str,
        protect_first: int,
        reads_share: bool,
    ) -> None:
        self.keys: list[ShareKey] = []
        """Keys of the stores at the positions among the known tokens, in order."""
        self._positions = positions
        self._start = {group: copy(one) for group, one in progress.items()}
        lengths = {one.max_length for one in progress.values()}
        # An eviction that could only run with the last step never runs.
        self._last = min(LONGEST if length is None else length for length in lengths) - 2
        self._hash_block_size = hash_block_size
        self._policy = policy
        self._protect_first = protect_first
        self._reads_share = reads_share

    def extend(self, request: "Request") -> None:
        """Add the keys of the positions that the tokens of a request have reached."""
        reached = min(request.num_tokens, self._last)
        positions = self._positions.up_to(reached)
        while len(self.keys) < len(positions):
            position = positions[len(self.keys)]
            if position.point > reached:
                return
            key = link_key(
                request,
                position,
                self._hash_block_size,
                self._policy,
                self._protect_first,
                self._reads_share,
                self.keys[-1].digest if self.keys else b"",
            )
            if key is None:
                return
            self.keys.append(key)

    def before(self, num_tokens: int) -> int:
        """Return the number of stores at positions before ``num_tokens``."""
        return bisect_left(self.keys, num_tokens, key=lambda key: key.point)

    def progress_after(self, links: int, prefill_end: int) -> dict[int, EvictionProgress]:
        """Return the progress of a request that starts with a store and computes a prefill."""
        point = self.keys[links - 1].point
        return {
            group: self._positions.progress_after(group, point, one, prefill_end)
            for group, one in self._start.items()
        }
