"""The most blocks that a request can ever hold at once: a sum of a few lengths, no simulation.

A request that is preempted is computed anew, answer included, as one prompt that ends wherever it
had come to. So what it holds before its first eviction depends on the length of that replay too.
"""

from vllm_kvevict.timeline.rule import EvictionRule, blocks_for


def max_blocks_ever(
    rule: EvictionRule,
    prompt_len: int,
    max_length: int,
    requested_point: int | None = None,
    on_demand: bool = False,
) -> int:
    """Blocks that suffice for a request in one group, preempted at any length or not at all.

    Nobody shares its blocks and evictions run when they are due, as in
    :meth:`~vllm_kvevict.timeline.progress.EvictionProgress.least_blocks`.

    Args:
        rule: The group's timeline as the request has it.
        prompt_len: Tokens of the prompt.
        max_length: Tokens of prompt and longest answer.
        requested_point: The eviction point that the request asked for, in (0, prompt_len];
            None for the end of prefill.
        on_demand: Whether it evicts only when it is called.

    """
    bs = rule.block_size
    whole = blocks_for(max_length, bs)
    if on_demand:
        return whole
    store = rule.store_blocks(prompt_len if requested_point is None else requested_point)
    if not rule.prefill_stride:
        # A replay evicts at its own end, which may be that of the answer, or at the point alone.
        freed = 0 if requested_point is None else _freed(rule, requested_point, max_length)
        if not freed:
            return whole
        assert requested_point is not None
        return max(blocks_for(requested_point, bs), whole - freed + store)
    # Rounding at either end of the recent tokens, and the block that a step in flight adds.
    between = store + blocks_for(rule.protected + max(rule.stride, rule.prefill_stride), bs) + 2
    first = rule.next_point(0)
    assert first is not None
    # Points begin where the mean budget is full, which is more than a group of a low share keeps.
    between = max(between, blocks_for(first, bs))
    if not rule.stride:
        freed = _freed_inside(rule, prompt_len, max_length, requested_point)
        between = max(between, whole - freed + store if freed else whole)
    return min(whole, between)


def _freed(rule: EvictionRule, n: int, max_length: int) -> int:
    """Positional blocks that a first eviction at ``n`` frees; 0 where it does not run."""
    gone = rule.tail_start(n) // rule.block_size
    return gone if n + 1 < max_length and gone > rule.store_blocks(n) else 0


def _freed_inside(
    rule: EvictionRule, prompt_len: int, max_length: int, requested_point: int | None
) -> int:
    """Positional blocks that the evictions inside a prompt have freed by its end."""
    points = [_freed(rule, prompt_len if requested_point is None else requested_point, max_length)]
    first = rule.next_point(0)
    assert first is not None
    if first < prompt_len:
        last = first + (prompt_len - 1 - first) // rule.prefill_stride * rule.prefill_stride
        store = rule.store_blocks(prompt_len if requested_point is None else requested_point)
        gone = rule.tail_start(last) // rule.block_size
        points.append(gone if gone > store else 0)
    return max(points)
