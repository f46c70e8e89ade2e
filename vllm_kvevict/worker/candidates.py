"""What one layer of a request holds at an eviction, read for the policy that scores it."""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_values import PageValues
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.reference.observe import window_queries
from vllm_kvevict.policies.base import Candidates, Policy
from vllm_kvevict.schedule.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.prompts import PromptDigests
from vllm_kvevict.worker.ranks import first_head, mean_of_ranks


@dataclass(frozen=True)
class CandidateReader:
    """Reads what a policy scores from the cache, the rings and the page values.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None where no policy needs them.
        page_values: Numbers beside the cached tokens, or None where no policy needs them.
        prompts: Digests of the prompts, or None where no policy draws by chance.

    """

    policies: Mapping[str, Policy]
    caches: Mapping[str, LayerCache]
    rings: ObservationRings | None
    page_values: PageValues | None
    prompts: PromptDigests | None

    def candidates(
        self,
        state: GroupState,
        layer_name: str,
        grid: torch.Tensor,
        padding: torch.Tensor,
        candidate_pages: int,
        eviction: Eviction,
        group: GroupEviction,
    ) -> Candidates:
        """One layer of the request, with what its policy reads.

        Args:
            state: The layer's group.
            layer_name: Name of the layer.
            grid: [H, P] int64 pages of the layer's candidates and what follows them.
            padding: [H] int64 padding pages at the left of each row.
            candidate_pages: Pages of a row that may be evicted, padding included.
            eviction: The eviction.
            group: Its part in the layer's group.

        """
        cache, policy = self.caches[layer_name], self.policies[eviction.policy]
        bs, window = state.timeline.block_size, state.timeline.window
        store_pages = grid.shape[-1] - len(group.positional)
        columns = store_pages * bs + eviction.num_tokens - group.old_tail_start
        queries = None
        recorded_window = policy.wants_window and eviction.ring is not None
        read = grid if policy.scorer.needs_keys or recorded_window else grid[:, :0]
        keys = cache.key_sequences(read)[:, :columns]
        if policy.needs_window or recorded_window:
            assert self.rings is not None and eviction.ring is not None
            recorded = window_queries(
                self.rings.layer(layer_name), eviction.ring, eviction.num_tokens, window
            )
            seen = recorded.float() * cache.query_scale
            queries = seen.unflatten(1, (state.num_heads, -1)).permute(1, 2, 0, 3)
        accumulated = None
        if policy.accumulates_attention:
            assert self.page_values is not None
            sums = self.page_values.layer(layer_name)[grid, :, 0]
            accumulated = sums.flatten(1)[:, :columns]
        values = None
        if policy.scorer.needs_values:
            values = cache.value_sequences(grid)[:, :columns]
        return Candidates(
            keys=keys,
            valid=torch.arange(columns, device=grid.device) >= (padding * bs)[:, None],
            queries=queries,
            window=window,
            num_candidates=candidate_pages * bs,
            scale=cache.scale,
            softcap=cache.softcap,
            mean_of_ranks=mean_of_ranks,
            keep=len(group.store) * bs,
            seed=self._seed(eviction),
            layer=crc32(layer_name.encode()),
            first_head=first_head(state.num_heads),
            accumulated=accumulated,
            values=values,
            protected=eviction.protect_first,
            sinks=None if cache.sinks is None else cache.sinks.float(),
        )

    def _seed(self, eviction: Eviction) -> tuple[int, ...]:
        if self.prompts is None:
            return ()
        return self.prompts.of(eviction.request_id), eviction.num_tokens
