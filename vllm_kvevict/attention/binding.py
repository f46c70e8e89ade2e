"""What the attention backend of one KV-cache group sees of the worker's eviction state."""

from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.extension import AttentionExtension
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.torch.observe import observe_index

Observation = tuple[torch.Tensor, torch.Tensor]

Extended = tuple[AttentionExtension, Any]
"""An extension, and what it made of its requests of a step."""


class WorkerView(Protocol):
    """What a backend asks the worker about the step that runs."""

    rings: ObservationRings | None
    extensions: list[AttentionExtension]

    def batch_rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 state rows in batch order; None outside a scheduled step."""

    def batch_rings(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 ring slots on the host, -1 for none; None where all have none."""

    def batch_accumulating(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Places of requests whose policy counts every query; None where there are none."""

    def cache(self, layer_name: str) -> LayerCache:
        """A layer's cache, ready to be read."""


class GroupBinding:
    """Bound to the metadata builder of a group whose layers evict.

    Outside a scheduled step (profiling, warm-up) every row counts as not evicted.

    Args:
        worker: What the backend asks of the worker.
        state: The group's.
        beyond: Tokens of a request in a drafter's first pass after those of the step.

    """

    guesses = False
    """Whether the pass computes tokens that a drafter guessed, whose queries are not recorded."""

    def __init__(self, worker: WorkerView, state: GroupState, beyond: int = 0) -> None:
        self._worker = worker
        self.state = state
        self._beyond = beyond

    def rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 state rows in batch order; None outside a scheduled step."""
        return self._worker.batch_rows(common)

    @property
    def records(self) -> bool:
        """Whether a policy that may be chosen needs the observation rings."""
        return self._worker.rings is not None

    def ring_slots(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 ring slots on the host, -1 for none; None where all have none."""
        return self._worker.batch_rings(common)

    def observation(self, common: CommonAttentionMetadata) -> Observation | None:
        """Tokens to record in this step and their ring entries; None where there are none."""
        ring = None if self.guesses else self._worker.batch_rings(common)
        if ring is None:
            return None
        window = self.state.timeline.window
        return observe_index(common.query_start_loc, common.seq_lens, ring, window, self._beyond)

    def extended(self, common: CommonAttentionMetadata) -> list[Extended]:
        """The extensions that serve requests of this step, and how each has laid them out."""
        rows = self._worker.batch_rows(common)
        if rows is None:
            return []
        found: list[Extended] = []
        for extension in self._worker.extensions:
            requests = self._worker.batch_accumulating(common)
            if extension.replaces:
                weighted = self.state.evicted[rows] & self.state.weighted[rows]
                requests = weighted.nonzero().flatten()
            if requests is not None and len(requests):
                batch = extension.build(common, self.state, rows[requests], requests)
                found.append((extension, batch))
        return found

    def scores(self, layer_name: str) -> bool:
        """Whether a layer's queries decide what to keep: those of the layer that owns a cache."""
        return self.state.owner(layer_name) == layer_name

    def rings(self, layer_name: str) -> torch.Tensor:
        """[slots * window, query heads, D]: the observation rings of a layer."""
        rings = self._worker.rings
        assert rings is not None
        return rings.layer(layer_name)
