"""What a request holds at most where no eviction is put off; blocks are counted one by one in
``test_rule.py``."""

from dataclasses import replace

from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import blocks_for


def peak_blocks(request: EvictionProgress, n: int) -> int:
    """Most blocks up to length ``n``, which counts scheduled tokens.

    The prefill, the store, both stores while one is replaced, and the block that a step in flight
    adds before an eviction's blocks are free.
    """
    bs, peak, freed, store = request.rule.block_size, 0, 0, 0
    if request.on_demand:
        return blocks_for(n, bs) + request.wanted(n)
    request = replace(request, tail_start=0, store_blocks=0, computed_valid=None)
    while request.next_eviction is not None and n >= request.next_eviction:
        due = request.next_eviction
        freed_next = request.evict(due)[1] // bs
        held = blocks_for(due, bs) - freed + store
        peak = max(peak, held + request.store_blocks + (n > due))
        freed, store = freed_next, request.store_blocks
    return max(peak, blocks_for(n, bs) - freed + store)
