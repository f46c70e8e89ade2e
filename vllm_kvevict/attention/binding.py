"""Interface between the attention backend of a KV-cache group and the worker's eviction state."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.extensions.base import AttentionExtension
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.torch.observe import observe_index

Observation = tuple[torch.Tensor, torch.Tensor]

Extended = tuple[AttentionExtension, Any]
"""An extension, and the batch that it built of its requests in a step."""


class WorkerView(Protocol):
    """The worker's state of the current step, as attention backends read it."""

    rings: ObservationRings | None
    extensions: list[AttentionExtension]

    def batch_rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the state rows [R] int64 in batch order; None outside a scheduled step."""

    def batch_rings(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the ring slots [R] int64 on the host, -1 for none; None if all have none."""

    def batch_accumulating(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the batch indices of requests with accumulated attention; None without any."""

    def cache(self, layer_name: str) -> LayerCache:
        """Return the cache of a layer."""


class GroupBinding:
    """Eviction state for the metadata builder of a group with evictable layers.

    Outside a scheduled step (profiling, warm-up), no request is evicted.

    Args:
        worker: The worker's state of the current step.
        state: The group's state.
        beyond: Number of tokens per request in a drafter's first pass after those of the step.

    """

    guesses = False
    """True if the pass computes draft tokens. Their queries are not recorded."""

    def __init__(self, worker: WorkerView, state: GroupState, beyond: int = 0) -> None:
        self._worker = worker
        self.state = state
        self._beyond = beyond

    def rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the state rows [R] int64 in batch order; None outside a scheduled step."""
        return self._worker.batch_rows(common)

    @property
    def records(self) -> bool:
        """True if any policy of the server needs the observation rings."""
        return self._worker.rings is not None

    @property
    def extensions(self) -> list[AttentionExtension]:
        """The extensions of attention of the server's policies."""
        return self._worker.extensions

    def ring_slots(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the ring slots [R] int64 on the host, -1 for none; None if all have none."""
        return self._worker.batch_rings(common)

    def observation(self, common: CommonAttentionMetadata) -> Observation | None:
        """Return the tokens to record in this step and their ring entries; None without any."""
        ring = None if self.guesses else self._worker.batch_rings(common)
        if ring is None:
            return None
        window = self.state.rule.window
        return observe_index(common.query_start_loc, common.seq_lens, ring, window, self._beyond)

    def extension_requests(
        self, common: CommonAttentionMetadata
    ) -> Iterator[tuple[AttentionExtension, torch.Tensor, torch.Tensor]]:
        """Yield each extension that runs requests of this step.

        Yields:
            The extension, and the state rows [K] int64 and batch indices [K] int64 of its requests.

        """
        rows = self._worker.batch_rows(common)
        for extension in self.extensions if rows is not None else ():
            requests = self._worker.batch_accumulating(common)
            if extension.replaces:
                weighted = self.state.evicted[rows] & self.state.weighted[rows]
                requests = weighted.nonzero().flatten()
            if requests is not None and len(requests):
                assert rows is not None
                yield extension, rows[requests], requests

    def extended(self, common: CommonAttentionMetadata) -> list[Extended]:
        """Return the extensions that run requests of this step, with the batch of each."""
        return [
            (extension, extension.build(common, self.state, rows, requests))
            for extension, rows, requests in self.extension_requests(common)
        ]

    def scores(self, layer_name: str) -> bool:
        """Return True if a layer's queries are scored: the layer owns its cache."""
        return self.state.owner(layer_name) == layer_name

    def cache(self, layer_name: str) -> LayerCache:
        """Return the cache that a layer reads, which another layer may own."""
        return self._worker.cache(self.state.owner(layer_name))

    @property
    def as_cached(self) -> bool:
        """True if vLLM's kernels read the pages of stores."""
        return self.cache(self.state.layer_names[0]).token_format.as_cached

    def rings(self, layer_name: str) -> torch.Tensor:
        """Return the observation ring of a layer: [slots * window, query heads, D]."""
        rings = self._worker.rings
        assert rings is not None
        return rings.layer(layer_name)
