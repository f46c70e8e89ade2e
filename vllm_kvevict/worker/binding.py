"""What the attention backend of one KV-cache group sees of the worker's eviction state."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.ops.reference.observe import observe_index
from vllm_kvevict.worker.state import GroupState

if TYPE_CHECKING:
    from vllm_kvevict.worker.eviction import WorkerEviction

Observation = tuple[torch.Tensor, torch.Tensor]


class GroupBinding:
    """Bound to the metadata builder of a group whose layers evict.

    Outside a scheduled step (profiling, warm-up) every row counts as not evicted.
    """

    def __init__(self, worker: "WorkerEviction", state: GroupState) -> None:
        self._worker = worker
        self.state = state

    def rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 state rows in batch order; None outside a scheduled step."""
        return self._worker.batch_rows(common)

    def observation(self, common: CommonAttentionMetadata) -> Observation | None:
        """Tokens to record in this step and their ring entries; None where there are none."""
        ring = self._worker.batch_rings(common)
        if ring is None:
            return None
        return observe_index(
            common.query_start_loc, common.seq_lens, ring, self.state.timeline.window
        )

    def rings(self, layer_name: str) -> torch.Tensor:
        """[slots * window, query heads, D]: the observation rings of a layer."""
        rings = self._worker.rings
        assert rings is not None
        return rings.layer(layer_name)
