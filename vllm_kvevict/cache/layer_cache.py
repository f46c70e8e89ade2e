"""One layer's KV cache as the eviction pass sees it."""

from dataclasses import dataclass

import torch

from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.fp8 import FP8, typed
from vllm_kvevict.ops.torch import probe
from vllm_kvevict.ops.torch.probe import Network, Prose, Rotation


@dataclass(frozen=True)
class LayerCache:
    """Head pages, how tokens lie in them, and what attention multiplies.

    Args:
        pages: [num_blocks * H, 2 * block_size * D] in the cache's dtype; uint8 holds FP8.
        layout: Where a page's tokens are.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        query_scale: A recorded query times this is the query that attention sees.
        key_scale: A stored key times this is the key; 1 unless the cache is FP8.
        value_scale: As ``key_scale``.
        sinks: [H, G] of any float type: the layer's attention sinks, None where it has none.

    """

    pages: torch.Tensor
    layout: PageLayout
    scale: float
    softcap: float
    query_scale: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.stored.dtype == FP8

    @property
    def is_latent(self) -> bool:
        """Whether its values are a part of its keys, of one head."""
        return not self.layout.values.numel()

    @property
    def stored(self) -> torch.Tensor:
        """``pages`` in the type that their elements have, not a copy."""
        return typed(self.pages)

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages.

        Args:
            pages: [...] int64.

        Returns:
            [..., block_size, D], a copy; float32 of an FP8 cache, else the cache's dtype.

        """
        return self._widened(self.layout.read_keys(self.pages, pages), self.key_scale)

    def sequences(self, elements: torch.Tensor) -> torch.Tensor:
        """Keys or values of pages behind one another.

        Args:
            elements: [H, P, block_size, D] of :meth:`keys` or :meth:`values`.

        Returns:
            [H, P * block_size, D]; the smaller of the last two strides stays the smaller.

        """
        if elements.stride(-2) < elements.stride(-1):
            return elements.permute(0, 3, 1, 2).flatten(2).mT
        return elements.flatten(1, 2)

    def key_sequences(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of pages behind one another.

        Args:
            pages: [H, P] int64.

        Returns:
            [H, P * block_size, D], a copy: float32 of an FP8 cache, else the cache's dtype.

        """
        if not pages.numel():
            dtype = torch.float32 if self.is_fp8 else self.pages.dtype
            size = self.layout.keys.shape[1]
            return torch.empty(len(pages), 0, size, dtype=dtype, device=pages.device)
        return self.sequences(self.keys(pages))

    def key_scores(
        self,
        pages: torch.Tensor,
        rotation: Rotation | None,
        weights: torch.Tensor,
        prose: Prose | None = None,
        network: Network | None = None,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores of the keys of pages [H, P] int64: [H, P * block_size, C] float32.

        Args:
            pages: The pages.
            rotation: Of their tokens; None for keys that were not rotated.
            weights: [H, C, D + 2] float32, of :func:`vllm_kvevict.ops.torch.probe.key_scores`;
                with ``prose`` [H, 2 * C, D + 2].
            prose: Of :func:`vllm_kvevict.ops.torch.probe.with_prose`.
            network: Of :func:`vllm_kvevict.ops.torch.probe.network_scores`, which is added to
                every score.
            shares: Of the same.

        """
        if network is not None:
            keys = probe.unrotated(self.sequences(self.keys(pages)), rotation)
            found = probe.key_scores(keys, None, weights)
            found = found if prose is None else probe.with_prose(found, *prose)
            return found.add_(probe.network_scores(keys, network, shares)[..., None])
        found = probe.key_scores(self.sequences(self.keys(pages)), rotation, weights)
        return found if prose is None else probe.with_prose(found, *prose)

    def value_sequences(self, pages: torch.Tensor) -> torch.Tensor:
        """Values of pages [H, P] int64 behind one another: [H, P * block_size, D] float32."""
        return self.sequences(self.values(pages)).float()

    def value_norms(self, pages: torch.Tensor) -> torch.Tensor:
        """[H, P * block_size] float32 Euclidean norms of the values of pages [H, P] int64."""
        values = self.sequences(self.values(pages))
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)

    def values(self, pages: torch.Tensor) -> torch.Tensor:
        """Values of whole pages, as :meth:`keys`."""
        return self._widened(self.layout.read_values(self.pages, pages), self.value_scale)

    def _widened(self, elements: torch.Tensor, scale: float) -> torch.Tensor:
        return typed(elements).float() * scale if self.is_fp8 else elements
