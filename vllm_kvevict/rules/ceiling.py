"""The maximum number of blocks that a request can hold at once, computed without a simulation.

A preempted request is computed again as one prompt that includes its answer so far. The blocks that
it holds before its first eviction therefore also depend on the length of that replay.
"""

from vllm_kvevict.rules.rule import EvictionRule, blocks_for


def max_blocks_ever(
    rule: EvictionRule,
    prompt_len: int,
    max_length: int,
    requested_point: int | None = None,
    on_demand: bool = False,
) -> int:
    """Return a number of blocks that suffices for a request in one group, even if it is preempted.

    This assumes that no block is shared and that evictions run when they are due, as in

    Args:
        rule: The eviction rule of the request in the group.
        prompt_len: Tokens of the prompt.
        max_length: Tokens of the prompt and the longest answer.
        requested_point: The eviction point that the request asked for, in (0, prompt_len]; None for
            the end of prefill.
        on_demand: True if the request evicts on demand only.

    """
    bs = rule.block_size
    all_blocks = blocks_for(max_length, bs)
    if on_demand:
        return all_blocks
    store = rule.store_blocks(prompt_len if requested_point is None else requested_point)
    if rule.every and not rule.bounds_prompts:
        return all_blocks
    if not rule.prefill_stride:
        # A replay evicts at its own end, which may be the end of the answer, or only at the point.
        freed = 0 if requested_point is None else _freed(rule, requested_point, max_length)
        if not freed:
            return all_blocks
        assert requested_point is not None
        return max(blocks_for(requested_point, bs), all_blocks - freed + store)
    # Rounding at both ends of the recent tokens, and the block that a step in flight adds.
    kept = store * rule.page_tokens + rule.protected
    between = blocks_for(kept + max(rule.stride, rule.prefill_stride), bs) + 2
    first = rule.next_point(0)
    assert first is not None
    # Points begin when the mean budget is full, which is more than a group with a small share
    # keeps.
    between = max(between, blocks_for(first, bs))
    if not rule.stride:
        freed = _freed_inside(rule, prompt_len, max_length, requested_point)
        between = max(between, all_blocks - freed + store if freed else all_blocks)
    return min(all_blocks, between)


def _freed(rule: EvictionRule, n: int, max_length: int) -> int:
    """Return the positional blocks that a first eviction at ``n`` frees; 0 if it does not run."""
    return rule.tail_start(n) // rule.block_size if n + 1 < max_length and rule.evictable(n) else 0


def _freed_inside(
    rule: EvictionRule, prompt_len: int, max_length: int, requested_point: int | None
) -> int:
    """Return the positional blocks that evictions inside a prompt have freed by its end."""
    points = [_freed(rule, prompt_len if requested_point is None else requested_point, max_length)]
    first = rule.next_point(0)
    assert first is not None
    if first < prompt_len:
        last = first + (prompt_len - 1 - first) // rule.prefill_stride * rule.prefill_stride
        store = rule.store_blocks(prompt_len if requested_point is None else requested_point)
        evicts = rule.tail_start(last) > store * rule.page_tokens
        points.append(rule.tail_start(last) // rule.block_size if evicts else 0)
    return max(points)
