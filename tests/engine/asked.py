"""What requests ask for and budgets come to, read once more without our code."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


class Asked:
    """What a request brings in ``extra_args``, read here once more."""

    def __init__(
        self, request: Any, policy: str, when: str, prefill_interval: int = 0, every: int = 0
    ) -> None:
        given = request.sampling_params.extra_args or {}
        self.pressure = given.get("kv_eviction_when", when) == "pressure"
        self.policy = given.get("kv_eviction", policy)
        self.budget = given.get("kv_eviction_budget")
        first = int(given.get("kv_eviction_protect_first", 0))
        self.protect_first = min(first, request.num_prompt_tokens)
        at = int(given.get("kv_eviction_at", 0))
        interval = given.get("kv_eviction_prefill_interval", prefill_interval)
        self.prefill_interval = int(interval) if self.policy != "none" else 0
        self.at = at + request.num_prompt_tokens if at < 0 else at
        own = {f"kv_eviction_{key}" for key in ("at", "interval", "prefill_interval")}
        every = int(given.get("kv_eviction_every", 0 if own & given.keys() else every))
        self.every = every if self.policy != "none" else 0
        self.interval = given.get("kv_eviction_interval")

    def decode_stride(self, servers: int, block_size: int, page: int) -> int:
        """Decode steps between evictions, in tokens: whole blocks that fill a page; 0 for never."""
        interval = servers if self.interval is None else int(self.interval)
        return blocks_apart(interval, block_size, page) * block_size

    def positions(
        self, end: int, budget: int | str, window: int, block_size: int, page: int
    ) -> range:
        """Where a request of ``end`` tokens may evict, prompt and answer, every so many tokens."""
        full = 0 if isinstance(budget, str) else budget
        kept = (max(1, (full - window) // page) + -(-self.protect_first // page)) * page
        first = (-(-kept // block_size) + -(-window // block_size)) * block_size
        stride = self.blocks_between(block_size, page) * block_size
        return range(first + stride, end + 1, stride)

    def blocks_between(self, block_size: int, page: int) -> int:
        """Blocks between evictions every so many tokens, which fill a page; 0 for no such ones."""
        return blocks_apart(self.every, block_size, page)

    def points(self, end: int, budget: int, window: int, block_size: int, page: int) -> list[int]:
        """Where prefill of ``end`` tokens may evict at a mean budget: the point, then intervals."""
        kept = (max(1, (budget - window) // page) + -(-self.protect_first // page)) * page
        first = kept + -(-window // block_size) * block_size
        stride = blocks_apart(self.prefill_interval, block_size, page) * block_size
        found = range(first + stride, end, stride) if stride else []
        return sorted({*found, *([self.at] if self.at else [])})


def blocks_apart(interval: int, block_size: int, page: int) -> int:
    """Whole blocks between evictions: those of an interval that is not 0, or of a page."""
    return -(-max(interval, page) // block_size) if interval else 0


def apportioned(mean: Fraction, most: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole blocks in [1, most] by share that sum to ``mean`` a group, by halving an interval."""
    total = mean * len(shares)
    if total <= len(shares):
        return [1] * len(shares)
    # Floats, to the sixth digit: halving fractions takes half of all accounting.
    goal, parts = float(total), [float(share) for share in shares]
    low, high = 0.0, 1e6
    for _ in range(80):
        each = (low + high) / 2
        filled = sum(min(max(each * share, 1.0), most) for share in parts)
        low, high = (each, high) if filled < goal else (low, each)
    exact = [round(min(max(high * share, 1.0), float(most)), 6) for share in parts]
    kept = [int(blocks) for blocks in exact]
    for group in sorted(range(len(kept)), key=lambda group: kept[group] - exact[group]):
        if sum(kept) + 1 <= total and kept[group] < most:
            kept[group] += 1
    return kept
