"""How many tokens a budget keeps, from the same arithmetic that the server evicts by."""

from dataclasses import dataclass

from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class Kept:
    """What an eviction at a point keeps: ``tokens`` per KV head on average over the heads.

    ``evicts`` is False where the budget covers everything; ``tokens`` is the point then.
    """

    tokens: int
    evicts: bool


def kept(budget: str, point: int, window: int, block_size: int, store_dtype: str = "auto") -> Kept:
    """Tokens per KV head after an eviction at ``point`` (whole pages and the tail).

    Args:
        budget: As ``--kv-eviction-budget``; a share is one of ``point``.
        point: Tokens in the cache when it is evicted.
        window: Observation window.
        block_size: Tokens in a block of the server's cache.
        store_dtype: ``--kv-eviction-store-dtype`` of the server.

    """
    config = EvictionConfig(
        policy="snapkv", budget=budget, window=window, interval=0, store_dtype=store_dtype
    )
    rule = config.rule(block_size)
    store = rule.store_blocks(point)
    if not rule.evictable(point):
        return Kept(point, False)
    return Kept(store * rule.page_tokens + point - rule.tail_start(point), True)
