"""Eviction rules: how often requests evict and how much they keep. Pure arithmetic on lengths.

The engine core and the workers both compute from this module, so neither sends the other how much
is evicted. Nothing here imports torch or vLLM.

Units: every length and position is in tokens, every count in blocks. A block of the store has the
bytes of any other block. Per KV head it holds ``page_tokens`` tokens, others ``block_size``. ``n``
is the number of tokens with keys in the cache at the end of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_kvevict.rules.layers import Share

MIN_INTERVAL_WINDOWS = 4
"""Windows in the shortest interval that a request may choose by itself. An eviction reads the
queries of one window again."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks needed for ``tokens`` tokens."""
    return -(-tokens // block_size)


def _whole(tokens: float) -> int:
    # 29% of 100 tokens are 29, although 100 * 0.29 is slightly less in floating point.
    return int(round(tokens, 6))


@dataclass(frozen=True)
class EvictionRule:
    """The eviction rule of one group of layers.

    Args:
        block_size: Tokens in a block.
        window: Observation window w: the queries of the last w tokens score the other tokens.
        interval: Decode steps between evictions, at least the tokens of a page of the store; 0
            evicts after prefill only.
        budget_tokens: Tokens kept per KV head, window included; None if a share is given.
        budget_share: Share of the memory of the tokens so far that is kept, in (0, 1]; None if
            tokens are given. It is a share of the tokens if pages of the store hold no more of them
            than others.
        min_tokens: Minimum number of tokens per KV head for a share.
        max_tokens: Maximum number of tokens per KV head for a share; None for no limit.
        share: Budget of the group relative to the mean over all layers; None if all layers have the
            same budget.
        prefill_interval: Tokens of prefill between evictions inside a prompt, at least those of a
            page of the store; 0 for no such evictions.
        recent: Last tokens that are never evicted; None for the window.
        protect_first: First tokens that no head evicts. Every head has the pages of these tokens in
            addition to the budget of the group.
        cap: Maximum for the budget and the pages of protected tokens together: tokens, or a share
            as in ``budget_share``. A larger budget is its own cap. None for no cap.
        page_tokens: Tokens in a page of the store, at least ``block_size``; 0 for ``block_size``.
        every: Tokens of prompt and answer between evictions, at least those of a page of the store.
            They then come at fixed positions only and at neither the end of the prompt nor the
            intervals; 0 for no such evictions.

    Raises:
        ValueError: A length is out of range, not exactly one budget is given, or a prefill interval
            is combined with a budget as a share.

    """

    block_size: int
    window: int
    interval: int
    budget_tokens: int | None = None
    budget_share: float | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    share: Share | None = None
    prefill_interval: int = 0
    recent: int | None = None
    protect_first: int = 0
    cap: int | float | None = None
    page_tokens: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        if not self.page_tokens:
            object.__setattr__(self, "page_tokens", self.block_size)
        if min(self.block_size, self.window, self.protected) < 1:
            raise ValueError("block_size, window and recent must be at least 1")
        if self.page_tokens < self.block_size:
            raise ValueError("page_tokens must be at least block_size")
        if min(self.interval, self.prefill_interval, self.protect_first, self.every) < 0:
            raise ValueError("intervals and protect_first must be at least 0")
        if self.every and self.prefill_interval:
            raise ValueError("give at most one of every and prefill_interval")
        if (self.budget_tokens is None) == (self.budget_share is None):
            raise ValueError("give exactly one of budget_tokens and budget_share")
        if self.prefill_interval and self.budget_tokens is None:
            raise ValueError("prefill_interval needs a budget in tokens")

    @property
    def protected(self) -> int:
        """Last tokens that are never evicted."""
        return self.window if self.recent is None else self.recent

    @property
    def may_keep_all(self) -> bool:
        """True if the budget is a share of the memory in which all tokens may fit: an eviction may
        free blocks without evicting a token."""
        return self.budget_share is not None and self.page_tokens > self.block_size

    @property
    def may_free(self) -> bool:
        """False if the budget is all tokens, so that no eviction frees a block."""
        return self.budget_share is None or self.budget_share < 1 or self.may_keep_all

    @property
    def stride(self) -> int:
        """Decode steps between two evictions, as :meth:`_apart` has them; 0 for never."""
        return self.prefill_stride if self.every else self._apart(self.interval)

    @property
    def pause(self) -> int:
        """Decode steps between attempts to evict: the stride, or four windows in whole blocks if
        nothing evicts in decode.

        A deferred eviction then holds a slot of the observation rings for a quarter of the time at
        most.
        """
        return self.stride or self._whole_blocks(MIN_INTERVAL_WINDOWS * self.window)

    @property
    def prefill_stride(self) -> int:
        """Tokens of prefill between two evictions, as :meth:`_apart` has them; 0 for none."""
        return self._apart(self.every or self.prefill_interval)

    def _apart(self, tokens: int) -> int:
        """Return the tokens between two evictions for an interval of ``tokens``; 0 for 0.

        They are whole blocks, because the tail start moves by whole blocks, and at least a page of
        the store. With fewer new tokens, no head could fill a page that another head gives up, and
        all heads would keep the numbers of pages with which the first store of a request begins.
        """
        return self._whole_blocks(max(tokens, self.page_tokens)) if tokens else 0

    def _whole_blocks(self, tokens: int) -> int:
        """Return ``tokens`` rounded up to whole blocks, in tokens."""
        return blocks_for(tokens, self.block_size) * self.block_size

    @property
    def bounds_prompts(self) -> bool:
        """True if a prompt of any length holds a bounded number of blocks."""
        if self.every and self.share is not None:
            # The store of a group may depend on the length.
            return False
        return self.prefill_stride > 0 and self.budget_tokens is not None

    def next_point(self, n: int) -> int | None:
        """Return the first position after ``n`` at which every prefill evicts, and with ``every``
        every answer too; None if there is none.

        The points begin when the mean budget and one interval are full. They are the same for all
        groups of layers, so that a chunk ends for all of them.
        """
        stride = self.prefill_stride
        if not stride:
            return None
        first = self._first_point
        return first + max(0, (n - first) // stride + 1) * stride

    @cached_property
    def _first_point(self) -> int:
        kept = replace(self, share=None).store_blocks(0) * self.page_tokens
        recent = self._whole_blocks(self.protected)
        if self.every:
            # A store that others continue ends with a whole block.
            kept = self._whole_blocks(kept)
        return kept + recent + self.prefill_stride

    def max_blocks(self, longest: int) -> int:
        """Return a number of blocks that suffices for any request of ``longest`` tokens, prompt and
        answer.

        If the rule does not evict both in prefill and in decode, these are all blocks of the
        request, because an answer may be all of it.
        """
        all_blocks = blocks_for(longest, self.block_size)
        if not self.bounds_prompts or not self.stride:
            return all_blocks
        bs, store = self.block_size, replace(self, share=None).store_blocks(0)
        if self.share is not None:
            # Up to this length, a group may have more blocks than in the longest prompt.
            highest = max(*self.share.shares, self.share.steepest or 0)
            bend = self.protected + highest * self.budget(0)
            lengths = range(self.protected, min(longest, int(bend) + bs) + bs, bs)
            store = max([store, *(self.store_blocks(length) for length in lengths)])
        # Before its first eviction, a request holds the tokens of its store in other blocks.
        first = store * self.page_tokens + self.protected + max(self.stride, self.prefill_stride)
        return min(all_blocks, blocks_for(first, bs) + 2)

    def budget(self, length: int) -> int:
        """Return the tokens kept per KV head out of ``length``, window included, as a mean over all
        layers.

        ``length`` counts all tokens that were computed, including those that were evicted.
        """
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_share is not None
        tokens = max(self.min_tokens, self._held_by(length * self.budget_share, length))
        return tokens if self.max_tokens is None else min(self.max_tokens, tokens)

    def _held_by(self, memory: float, length: int) -> int:
        """Return the tokens, at most ``length``, in the memory of so many tokens of vLLM's cache.

        Protected tokens are in such pages, the others in pages of the store.
        """
        if self.page_tokens == self.block_size or memory <= self.protected:
            return _whole(memory)
        stored = (memory - self.protected) * self.page_tokens / self.block_size
        return min(length, _whole(self.protected + stored))

    @property
    def first_blocks(self) -> int:
        """Pages of protected tokens, which every head has."""
        return blocks_for(self.protect_first, self.page_tokens)

    def chosen(self, length: int) -> int:
        """Return the tokens kept per KV head in addition to protected ones: the budget, or the
        remainder of the cap."""
        budget = self.budget(length)
        if self.cap is None:
            return budget
        cap = self.cap
        if not isinstance(cap, int):
            cap = self._held_by(length * cap, length)
        return min(budget, max(cap, budget) - self.first_blocks * self.page_tokens)

    def store_blocks(self, length: int) -> int:
        """Return S, the number of blocks of the store that an eviction at ``length`` tokens fills.

        A layer of the group keeps S pages per KV head on average. The pages of protected tokens are
        the same in every group and do not depend on its share of the budget.
        """
        selected, last = self.chosen(length) - self.protected, self.tail_start(length)
        if self.share is None:
            blocks = max(1, selected // self.page_tokens)
        else:
            # A budget in tokens is a share that falls with the length. If shares followed it, a
            # group could keep more of a shorter text.
            constant = self.budget_share is not None
            length -= self.protected
            blocks = self.share.blocks(selected, length, self.page_tokens, constant)
        if self.may_keep_all:
            # The store has whole pages of tokens.
            blocks = min(blocks, max(1, last // self.page_tokens - self.first_blocks))
        return self.first_blocks + blocks

    def tail_start(self, n: int) -> int:
        """Return T, the first position that stays in its positional block in an eviction at
        ``n``."""
        return max(0, (n - self.protected) // self.block_size * self.block_size)

    def evictable(self, n: int) -> bool:
        """Return whether a first eviction at ``n`` would free a block."""
        start, store = self.tail_start(n), self.store_blocks(n)
        if self.may_keep_all and store * self.page_tokens <= start:
            return start > store * self.block_size
        return start > store * self.page_tokens

    def shortest_evicted(self, longest: int) -> int | None:
        """Return the length of the shortest prompt, up to ``longest`` tokens, that is evicted at
        its end.

        The result is None if all prompts are too short.
        """
        # The tail start changes only at these lengths.
        lengths = range(self.protected, longest + 1, self.block_size)
        return next((n for n in lengths if self.evictable(n)), None)


MIN_DECODE_EVICTIONS = 4
"""Number of decode evictions that a step may always include."""


def decode_evictions(running: int, rules: Iterable[EvictionRule]) -> int:
    """Return the maximum number of decode evictions per step. Every token of the next step waits
    for them.

    The number is twice the average need of the running requests, so that no request waits long.
    Requests that were admitted together evict in different steps from then on. It does not depend
    on the intervals that requests choose: those with shorter ones than the server's wait.

    Args:
        running: Number of running requests.
        rules: The server's eviction rules, at least one.

    """
    return max(MIN_DECODE_EVICTIONS, blocks_for(2 * running, min(rule.pause for rule in rules)))
