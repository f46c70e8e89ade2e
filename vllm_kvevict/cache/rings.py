"""The observation rings: the last queries of requests whose eviction is near."""

from collections.abc import Sequence

import torch


class ObservationRings:
    """Queries of every evictable layer, at a fixed address.

    Args:
        layer_names: Evictable layers on this rank.
        slots: Ring slots; the scheduler hands them out.
        window: Queries a slot holds.
        num_query_heads: Query heads on this rank.
        head_size: D.
        dtype: The model's dtype.
        device: Where attention runs.

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

    def layer(self, layer_name: str) -> torch.Tensor:
        """[slots * window, query heads, D] of one layer."""
        return self._queries[self._index[layer_name]]
