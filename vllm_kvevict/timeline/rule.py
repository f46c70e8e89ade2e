"""How often requests evict, and how much is kept: pure arithmetic on lengths.

The engine core and the workers both read this module, so neither has to tell the other
how much is evicted. Nothing here imports torch or vLLM.

Units: every length and position is in tokens, every count in blocks of ``block_size``
tokens. ``n`` is the number of tokens whose keys are in the cache at the end of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm_kvevict.timeline.layers import Share


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks needed for ``tokens`` tokens."""
    return -(-tokens // block_size)


def _whole(tokens: float) -> int:
    # Of 100 tokens 29% are 29, although 100 * 0.29 is a hair less.
    return int(round(tokens, 6))


@dataclass(frozen=True)
class EvictionRule:
    """The eviction schedule of one group of layers (DESIGN section 2).

    Args:
        block_size: Tokens in a block.
        window: Observation window w: last tokens whose queries score the others.
        interval: Decode steps between evictions; 0 evicts after prefill only.
        budget_tokens: Tokens kept per KV head, window included; None if a share is given.
        budget_share: Share of the tokens so far kept per KV head, in (0, 1]; None if tokens are
            given.
        least: Tokens per KV head that a share comes to at least.
        most: Tokens per KV head that a share comes to at most; None for no bound.
        share: What the group keeps relative to the mean over all layers, which the budget is;
            None where every layer has the same.
        prefill_interval: Tokens of prefill between evictions inside it; 0 for none.
        recent: Last tokens that are never evicted; None for the window.
        protect_first: First tokens that no head evicts. Every head has their pages in addition to
            what the budget gives the group.
        cap: Tokens, or a share of the tokens so far in (0, 1], that the budget and the pages of
            protected tokens may reach together. A larger budget is its own cap. None for no cap.

    Raises:
        ValueError: A length is out of range, not exactly one budget is given, or prefill evicts in
            intervals to a share.

    """

    block_size: int
    window: int
    interval: int
    budget_tokens: int | None = None
    budget_share: float | None = None
    least: int = 0
    most: int | None = None
    share: Share | None = None
    prefill_interval: int = 0
    recent: int | None = None
    protect_first: int = 0
    cap: int | float | None = None

    def __post_init__(self) -> None:
        if min(self.block_size, self.window, self.protected) < 1:
            raise ValueError("block_size, window and recent must be at least 1")
        if min(self.interval, self.prefill_interval, self.protect_first) < 0:
            raise ValueError("intervals and protect_first must be at least 0")
        if (self.budget_tokens is None) == (self.budget_share is None):
            raise ValueError("give exactly one of budget_tokens and budget_share")
        if self.prefill_interval and self.budget_tokens is None:
            raise ValueError("prefill_interval needs a budget in tokens")

    @property
    def protected(self) -> int:
        """Last tokens that are never evicted."""
        return self.window if self.recent is None else self.recent

    @property
    def stride(self) -> int:
        """Decode steps between two evictions: the interval in whole blocks, 0 for never.

        The tail start moves by whole blocks, so a shorter interval would find nothing to evict.
        """
        return blocks_for(self.interval, self.block_size) * self.block_size

    @property
    def prefill_stride(self) -> int:
        """Tokens of prefill between two evictions: the interval in whole blocks, 0 for none."""
        return blocks_for(self.prefill_interval, self.block_size) * self.block_size

    def next_point(self, n: int) -> int | None:
        """The first position behind ``n`` at which every prefill evicts; None for none.

        They begin where the mean budget and one interval are full, and are the same for all groups
        of layers, so that a chunk ends for all of them.
        """
        stride = self.prefill_stride
        if not stride:
            return None
        kept = replace(self, share=None, cap=None).store_blocks(n)
        first = (kept + blocks_for(self.protected, self.block_size)) * self.block_size + stride
        return first + max(0, (n - first) // stride + 1) * stride

    def most_blocks(self, longest: int) -> int:
        """Blocks that suffice for any one request of ``longest`` tokens, prompt and answer.

        As many as it has where it does not evict in both: an answer may be all of it.
        """
        whole = blocks_for(longest, self.block_size)
        if not self.prefill_stride or not self.stride:
            return whole
        bs, most = self.block_size, replace(self, share=None).store_blocks(0)
        if self.share is not None:
            # Up to here a group may have more than in the longest prompt.
            highest = max(*self.share.shares, self.share.steepest or 0)
            bend = self.protected + highest * self.budget(0)
            lengths = range(self.protected, min(longest, int(bend) + bs) + bs, bs)
            most = max([most, *(self.store_blocks(length) for length in lengths)])
        between = blocks_for(self.protected + max(self.stride, self.prefill_stride), bs)
        return min(whole, most + between + 2)

    def budget(self, length: int) -> int:
        """Tokens kept per KV head of ``length`` tokens, window included: the mean over all layers.

        ``length`` counts all tokens that were computed, whatever earlier evictions took.
        """
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_share is not None
        tokens = max(self.least, _whole(length * self.budget_share))
        return tokens if self.most is None else min(self.most, tokens)

    @property
    def first_blocks(self) -> int:
        """Pages of protected tokens, which every head has."""
        return blocks_for(self.protect_first, self.block_size)

    def chosen(self, length: int) -> int:
        """Tokens kept per KV head besides protected ones: the budget, or what the cap leaves."""
        budget = self.budget(length)
        if self.cap is None:
            return budget
        cap = self.cap if isinstance(self.cap, int) else _whole(length * self.cap)
        return min(budget, max(cap, budget) - self.first_blocks * self.block_size)

    def store_blocks(self, length: int) -> int:
        """S, the blocks of the store that an eviction at ``length`` tokens fills.

        A layer of the group keeps S pages per KV head on average. The pages of protected tokens
        are the same in every group, whatever its share of the budget.
        """
        beside = self.chosen(length) - self.protected
        if self.share is None:
            blocks = max(1, beside // self.block_size)
        else:
            blocks = self.share.blocks(beside, length - self.protected, self.block_size)
        return self.first_blocks + blocks

    def tail_start(self, n: int) -> int:
        """T, the first position that stays in its positional block when evicting at ``n``."""
        return max(0, (n - self.protected) // self.block_size * self.block_size)

    def evictable(self, n: int) -> bool:
        """Whether a first eviction at ``n`` would free anything."""
        return self.tail_start(n) > self.store_blocks(n) * self.block_size

    def shortest_evicted(self, longest: int) -> int | None:
        """The shortest prompt, of ``longest`` tokens at most, that is evicted at its end.

        None where all are too short.
        """
        # Only at these lengths the tail start moves on.
        lengths = range(self.protected, longest + 1, self.block_size)
        return next((n for n in lengths if self.evictable(n)), None)


LEAST = 4
"""Decode evictions that a step may always carry."""


def decode_evictions(running: int, rules: Iterable[EvictionRule]) -> int:
    """How many decode evictions a step carries at most: each token of the next waits for them.

    Twice what running requests need on average, so none waits long for its turn; those that were
    admitted together evict in different steps from there on.
    """
    strides = [rule.stride for rule in rules if rule.stride]
    return max(LEAST, blocks_for(2 * running, min(strides, default=1)))
