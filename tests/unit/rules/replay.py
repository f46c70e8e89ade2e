"""A request's progress from eviction to eviction, one at a time: what closed forms must agree
with."""

from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import blocks_for


class Replay(EvictionProgress):
    """Progress that tries every point inside a prompt."""

    def _inside(self, n: int) -> int | None:
        last = self.context_end if n < self.context_end else self.prefill_end
        point = self.rule.next_point(n)
        while point is not None and point < last:
            if self.gain(point) > 0:
                return point
            point += self.rule.prefill_stride
        if n >= self.context_end:
            return None
        return self._before_end(last) if self.gain(last) > 0 else self._inside(last)


def sufficient_blocks(request: EvictionProgress, n: int) -> int:
    """Most blocks up to length ``n`` where evictions reuse the request's own blocks."""
    replay = Replay(
        request.rule, request.prompt_len, request.prefill_end, request.requested_point,
        request.max_length, request.on_demand, shares_context=request.shares_context,
    )  # fmt: skip
    bs, peak, freed, store = request.rule.block_size, 0, 0, 0
    while replay.next_eviction is not None and n >= replay.next_eviction:
        due = replay.next_eviction
        in_flight = n > due and (due >= replay.prefill_end or not replay.has_eviction_points)
        peak = max(peak, blocks_for(due, bs) - freed + store + in_flight)
        freed, store = replay.evict(due)[1] // bs, replay.store_blocks
    return max(peak, blocks_for(n, bs) - freed + store)
