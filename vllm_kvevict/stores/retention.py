"""Which cached state leaves first, and why. Every place that decides it asks here.

The free queue of vLLM's pool, from the block that is handed out first to the one that is handed
out last::

    +-------+------------+------------------------------------------------+
    | blank | superseded | by last use: states, prefixes, and what was    |
    |       |            | computed over states; a state after the latter |
    +-------+------------+------------------------------------------------+
      first out                                                  last out

- **Blank** blocks have no hash. Nothing can be found in them.
- **Superseded** blocks still have one. An eviction has replaced them, and the state that it made
  continues what they hold: the next turn of the conversation starts with that state. Without this
  rank, each prompt of a conversation would push the states of idle conversations out, because its
  replaced blocks are the ones that were used last.
- All other blocks leave by last use, as in vLLM.

A state is not superseded, although its request has evicted past it, if another request is expected
to start with it (:func:`is_superseded`): the last state of a prompt, because the next turn may not
repeat the answer; a state with which several requests have started; one that was made again, and
after which the conversation goes on differently; and one for which a request has just returned to
the queue. A block with several owners is superseded if all of them are. Blocks of a prompt that
several requests compute or find are a beginning that they share, and leave by last use too.

An eviction writes its survivors to fresh blocks if these are blank or superseded. If the next fresh
block holds anything else, it overwrites what it supersedes itself::

    before   | state K1 | tail                     |     free: | blank | superseded | idle ...
                          \\____ replaced ____/
    after    | state K2 (fresh blocks) | tail |          free: | K1, replaced | idle ...
    or       | state K2 (blocks of K1) | tail |          free: | replaced | idle ...

Host memory and files have the same ranks: states that a later one of the same request continues,
then the others by last use (:class:`KeptStates`); unfinished files, then the others by last use
(:func:`file_order`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MARK = b"kv_eviction store"
"""First bytes of the hashes that states, and what is computed over them, give their blocks."""

MAX_BEGINNINGS = 1 << 15
"""Maximum number of remembered hashes of prompts' blocks, of which each takes some 150 bytes."""


class State(Protocol):
    """A cached state, whose blocks other states may share."""

    hashes: "list[tuple[KVCacheBlock, bytes]]"
    superseded: bool
    starts: int
    again: bool

    @property
    def ends_intact(self) -> bool: ...


def is_superseded(state: State, of_prompt: bool, parted: bool, awaited: bool) -> bool:
    """Return True if no request is expected to start with a state past which its request evicts.

    Args:
        state: The state.
        of_prompt: True if it is the last one of the prompt.
        parted: True if the next state of the request was never made before.
        awaited: True if a request returned to the queue to start with the state.

    """
    if of_prompt or awaited or state.starts > 1:
        return False
    return not (state.again and parted)


def file_order(finished: bool, last_use: float) -> tuple[bool, float]:
    """Return the key by which files leave: unfinished ones first, then by last use."""
    return finished, last_use


class KeptStates(OrderedDict[str, int]):
    """Bytes of the states in host memory by name, in the order in which they leave."""

    def use(self, name: str) -> None:
        """Record that a state was used or saved."""
        self.move_to_end(name)

    def supersede(self, name: str) -> None:
        """Record that a later state of the same request continues this one."""
        self.move_to_end(name, last=False)


class Retention:
    """The order in which blocks leave the KV cache.

    Args:
        pool: vLLM's pool of blocks.

    """

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._owners: dict[int, dict[State, None]] = {}
        """States that contain a block, by id."""
        self._superseded: dict[int, bytes] = {}
        """Hashes of the blocks that were freed as superseded ones, by id."""
        self._unplaced: dict[int, bytes] = {}
        """Those of them that are at the end of the queue, because there were blank ones."""
        self._beginnings: OrderedDict[bytes, None] = OrderedDict()

    def enter(self, state: State) -> None:
        """Record the blocks of a state."""
        for block, _ in state.hashes:
            self._owners.setdefault(block.block_id, {})[state] = None

    def drop(self, state: State) -> None:
        """Forget the blocks of a state that can no longer be found."""
        for block, _ in state.hashes:
            owners = self._owners.get(block.block_id, {})
            owners.pop(state, None)
            if not owners:
                self._owners.pop(block.block_id, None)

    def owners(self, block_id: int) -> Sequence[State]:
        """Return the states that contain a block."""
        return list(self._owners.get(block_id, ()))

    def is_protected(self, block: "KVCacheBlock") -> bool:
        """Return True if a block is of a state with which a request may still start."""
        owners = self._owners.get(block.block_id, ())
        return any(not state.superseded and state.ends_intact for state in owners)

    def free(self, blocks: Sequence["KVCacheBlock"], found: int = 0) -> None:
        """Free blocks that an eviction has superseded.

        Args:
            blocks: The blocks, the first to leave first.
            found: Number of blocks at the end of ``blocks`` that the request had found in the
                prefix cache.

        """
        first: list[KVCacheBlock] = []
        found = len(blocks) - found
        for index, block in enumerate(blocks):
            block_hash = block.block_hash
            if (
                index < found
                and block.ref_cnt == 1
                and block_hash is not None
                and not self.is_protected(block)
                and not self._is_shared_beginning(block_hash)
            ):
                first.append(block)
        self._pool.free_blocks(blocks)
        for block in first:
            assert block.block_hash is not None
            self._superseded[block.block_id] = self._unplaced[block.block_id] = block.block_hash

    def _is_shared_beginning(self, block_hash: bytes) -> bool:
        """Return whether another request has computed an equal block of a prompt before."""
        if block_hash.startswith(MARK):
            return False
        if block_hash in self._beginnings:
            self._beginnings.move_to_end(block_hash)
            return True
        self._beginnings[block_hash] = None
        if len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)
        return False

    def used(self, blocks: Iterable["KVCacheBlock"]) -> None:
        """Record that blocks are in use until now, so that they leave by last use."""
        if self._superseded:
            for block in blocks:
                self._superseded.pop(block.block_id, None)
                self._unplaced.pop(block.block_id, None)

    def costs_nothing(self, count: int) -> bool:
        """Return True if the next ``count`` blocks that the pool hands out are blank or
        superseded.

        The pool hands out blocks that were never used in the order of their ids, and before all
        that are cached. While the last ``count`` ids are such, none of them is looked at.
        """
        blocks, first = self._pool.blocks, -max(2, count)
        if not blocks[first].block_hash and blocks[first].next_free_block is blocks[first + 1]:
            return True
        return self._front(count)[1] is None

    def make_way(self, count: int) -> None:
        """Move superseded blocks before those that leave by last use, if one of the next ``count``
        blocks is among the latter."""
        if not self._unplaced:
            return
        front, used = self._front(count)
        if used is None:
            return
        queue, blocks = self._pool.free_block_queue, self._pool.blocks
        moved = []
        for block_id, block_hash in self._unplaced.items():
            block = blocks[block_id]
            if block.ref_cnt == 0 and block.block_hash == block_hash:
                moved.append(block)
        self._unplaced.clear()
        ids = {block.block_id for block in moved}
        ordered = [block for block in front if block.block_id not in ids] + moved
        for block in ordered:
            queue.remove(block)
        queue.prepend_n(ordered)

    def _front(self, count: int) -> "tuple[list[KVCacheBlock], KVCacheBlock | None]":
        """Return the blocks before the first one that leaves by last use, and that one; None if it
        is not among the next ``count`` blocks."""
        front: list[KVCacheBlock] = []
        for block in self._queued():
            if len(front) == count:
                break
            if block.block_hash not in (None, self._superseded.get(block.block_id)):
                return front, block
            front.append(block)
        return front, None

    def _queued(self) -> "Iterator[KVCacheBlock]":
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        # The last block of the queue is not one of the pool's.
        while block is not None and block.next_free_block is not None:
            yield block
            block = block.next_free_block

    def renew(self, state: State) -> None:
        """Move the blocks of a state that was in use to the end of the queue, so that they leave
        after what was computed over it."""
        idle = [block for block, _ in state.hashes if block.ref_cnt == 0]
        self.used(idle)
        self._pool.touch(idle)
        self._pool.free_blocks(idle)
