"""When a request evicts, and how many blocks it holds: pure arithmetic on lengths.

The engine core and the workers both read this module, so neither has to tell the other
how much is evicted. Nothing here imports torch or vLLM.

Units: every length and position is in tokens, every count in blocks of ``block_size``
tokens. ``n`` is the number of tokens whose keys are in the cache at the end of a step.
"""

from dataclasses import dataclass, field


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks needed for ``tokens`` tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True)
class Timeline:
    """The eviction schedule of one group of layers (DESIGN section 2).

    Args:
        block_size: Tokens in a block.
        window: Observation window w; these last tokens are never evicted.
        interval: Decode steps between evictions; 0 evicts after prefill only.
        budget_tokens: Tokens kept per KV head, window included; None if a share is given.
        budget_share: Share of the prompt kept per KV head, in (0, 1]; None if tokens are given.

    Raises:
        ValueError: A length is out of range, or not exactly one budget is given.

    """

    block_size: int
    window: int
    interval: int
    budget_tokens: int | None = None
    budget_share: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.window < 1 or self.interval < 0:
            raise ValueError("block_size and window must be at least 1, interval at least 0")
        if (self.budget_tokens is None) == (self.budget_share is None):
            raise ValueError("give exactly one of budget_tokens and budget_share")

    @property
    def stride(self) -> int:
        """Decode steps between two evictions: the interval in whole blocks, 0 for never.

        The tail start moves by whole blocks, so a shorter interval would find nothing to evict.
        """
        return blocks_for(self.interval, self.block_size) * self.block_size

    def budget(self, prompt_len: int) -> int:
        """Tokens kept per KV head for a prompt of ``prompt_len`` tokens, window included."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_share is not None
        return int(prompt_len * self.budget_share)

    def store_blocks(self, prompt_len: int) -> int:
        """S, the blocks of the store: every layer keeps S pages per KV head on average."""
        return max(1, (self.budget(prompt_len) - self.window) // self.block_size)

    def tail_start(self, n: int) -> int:
        """T, the first position that stays in its positional block when evicting at ``n``."""
        return max(0, (n - self.window) // self.block_size * self.block_size)

    def evictable(self, n: int, store_blocks: int, old_tail_start: int) -> bool:
        """Whether an eviction at ``n`` would free anything.

        ``old_tail_start`` is 0 for a request that has not been evicted yet.
        """
        return self.tail_start(n) > (old_tail_start or store_blocks * self.block_size)

    def prefill_cap(self, prefill_end: int, prompt_len: int) -> int:
        """Most prompt tokens that a prefix-cache hit may cover.

        The queries of the last w tokens must be computed where the end of prefill evicts.
        """
        if not self.evictable(prefill_end, self.store_blocks(prompt_len), 0):
            return prefill_end
        return self.tail_start(prefill_end)

    def peak_blocks(self, prefill_end: int, prompt_len: int, n: int) -> int:
        """Most blocks a request can hold up to length ``n`` if no eviction is postponed.

        ``n`` counts scheduled tokens. Covers the prefill, the store, both stores while one is
        replaced, and the block that a step in flight adds before an eviction's blocks are free.
        """
        request = RequestTimeline(self, prompt_len, prefill_end)
        store, due, bs = request.store_blocks, request.due, self.block_size
        if due is None or n < due:
            return blocks_for(n, bs)
        first = blocks_for(due, bs) + store + (n > due)
        freed = self.tail_start(due) // bs
        if not self.stride or n < due + self.stride:
            return max(first, blocks_for(n, bs) - freed + store if n > due else 0)
        # The tail start moves by the stride as well: every later cycle is like the second.
        tail = blocks_for(due + self.stride, bs) - freed + (n > due + self.stride)
        return max(first, tail + 2 * store)


@dataclass
class RequestTimeline:
    """Where one request stands in its schedule, from admission to finish or preemption.

    ``prefill_end`` is E: the prompt, or everything that is replayed after a preemption.
    """

    timeline: Timeline
    prompt_len: int
    prefill_end: int
    tail_start: int = 0
    due: int | None = field(init=False)
    computed_valid: int | None = None
    """Tokens from here on were computed over an evicted cache; None before the first eviction."""

    def __post_init__(self) -> None:
        rule = self.timeline
        self.store_blocks = rule.store_blocks(self.prompt_len)
        if rule.evictable(self.prefill_end, self.store_blocks, 0):
            self.due = self.prefill_end
        elif rule.stride:
            # Too short to evict: joins in once it has outgrown its budget by the interval.
            budget = self.store_blocks * rule.block_size + rule.window
            self.due = max(budget + rule.stride, self.prefill_end + 1)
        else:
            self.due = None

    @property
    def evicted(self) -> bool:
        return self.computed_valid is not None

    def is_due(self, n: int) -> bool:
        """Whether the step that ends at ``n`` should evict."""
        return (
            self.due is not None
            and n >= self.due
            and self.timeline.evictable(n, self.store_blocks, self.tail_start)
        )

    def observes(self, n: int) -> bool:
        """Whether the step that ends at ``n`` computes queries of the coming window."""
        return self.due is not None and n > self.due - self.timeline.window

    def evict(self, n: int) -> tuple[int, int]:
        """Record the eviction of the step that ends at ``n``.

        Returns:
            The old and the new tail start; blocks between them are freed once the step is
            processed.

        """
        assert self.is_due(n), f"no eviction is due at {n} (due {self.due})"
        old, self.tail_start = self.tail_start, self.timeline.tail_start(n)
        if self.computed_valid is None:
            self.computed_valid = n
        self.due = n + self.timeline.stride if self.timeline.stride else None
        return old, self.tail_start
