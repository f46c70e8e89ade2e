"""One layer's KV cache as evictions read it."""

from dataclasses import dataclass

import torch

from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.fp8 import FP8, typed
from vllm_kvevict.ops.pieces import heads_at_once, joined


@dataclass(frozen=True)
class LayerCache:
    """Head pages, the layout of tokens in them, and the scales of attention.

    Args:
        pages: [num_blocks * H, 2 * block_size * D] in the cache's dtype; uint8 holds FP8.
        layout: Offsets of the tokens in a page.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        query_scale: Factor from a recorded query to the query that attention uses.
        key_scale: Factor from a stored key to the key; 1 unless the cache is FP8.
        value_scale: Factor from a stored value to the value; 1 unless the cache is FP8.
        sinks: [H, G] of any float type: the layer's attention sinks, None if it has none.

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
        """True for a latent cache (MLA), in which values are a part of the keys."""
        return not self.layout.values.numel()

    @property
    def stored(self) -> torch.Tensor:
        """View of ``pages`` in the dtype of their elements."""
        return typed(self.pages)

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the keys of pages.

        Args:
            pages: [...] int64.

        Returns:
            [..., block_size, D], a copy; float32 for an FP8 cache, else the cache's dtype.

        """
        return self._widened(self.layout.read_keys(self.pages, pages), self.key_scale)

    def sequences(self, elements: torch.Tensor) -> torch.Tensor:
        """Concatenate the keys or values of the pages of each head.

        Args:
            elements: [H, P, block_size, D] from :meth:`keys` or :meth:`values`.

        Returns:
            [H, P * block_size, D]. The order of the last two strides is preserved.

        """
        if elements.stride(-2) < elements.stride(-1):
            return elements.permute(0, 3, 1, 2).flatten(2).mT
        return elements.flatten(1, 2)

    def key_sequences(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the keys of the pages of each head, concatenated.

        Args:
            pages: [H, P] int64.

        Returns:
            [H, P * block_size, D], a copy: float32 for an FP8 cache, else the cache's dtype.

        """
        if not pages.numel():
            dtype = torch.float32 if self.is_fp8 else self.pages.dtype
            size = self.layout.keys.shape[1]
            return torch.empty(len(pages), 0, size, dtype=dtype, device=pages.device)
        return self.sequences(self.keys(pages))

    def value_sequences(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the values of pages [H, P] int64, concatenated: [H, P * block_size, D] float32."""
        return self.sequences(self.values(pages)).float()

    def value_norms(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean norms of the values of pages [H, P] int64.

        Returns:
            [H, P * block_size] float32.

        """
        size = pages.shape[1] * self.layout.values.numel()
        norms = [
            torch.linalg.vector_norm(self.sequences(self.values(some)), dim=-1, dtype=torch.float32)
            for some in pages.split(heads_at_once(pages.device, len(pages), size))
        ]
        return joined(norms)

    def values(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the values of pages, with the shape and dtype of :meth:`keys`."""
        return self._widened(self.layout.read_values(self.pages, pages), self.value_scale)

    def _widened(self, elements: torch.Tensor, scale: float) -> torch.Tensor:
        return typed(elements).float() * scale if self.is_fp8 else elements
