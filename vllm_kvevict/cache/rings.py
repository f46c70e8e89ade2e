"""Observation rings: the last queries of requests that will evict soon."""

from collections.abc import Sequence

import torch


class ObservationRings:
    """Recorded queries of every evictable layer, at a fixed address.

    Args:
        layer_names: Evictable layers on this rank.
        slots: Number of ring slots, which the scheduler assigns to requests.
        window: Queries in a slot.
        num_query_heads: Query heads on this rank.
        head_size: D.
        dtype: The model's dtype.
        device: Device of attention.

    """

    def __init__(
        self,
        layer_names: Sequence[str],
        slots: int,
        window: int,
        num_query_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._index = {name: index for index, name in enumerate(layer_names)}
        shape = (len(layer_names), slots * window, num_query_heads, head_size)
        self._queries = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._queries.numel() * self._queries.element_size()

    def reset(self) -> None:
        """Zero all queries, whatever the memory holds."""
        self._queries.zero_()

    def layer(self, layer_name: str) -> torch.Tensor:
        """Return the ring of one layer: [slots * window, query heads, D]."""
        return self._queries[self._index[layer_name]]
