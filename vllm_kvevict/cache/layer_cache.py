"""One layer's KV cache as evictions read it."""

from dataclasses import dataclass

import torch

from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.fp8 import FP8, typed
from vllm_kvevict.ops.pieces import heads_at_once, joined
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat


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
        token_format: Format of the tokens in pages of stores. All other pages hold tokens as vLLM
            wrote them.

    """

    pages: torch.Tensor
    layout: PageLayout
    scale: float
    softcap: float
    query_scale: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = None
    token_format: TokenFormat = AS_CACHED

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of a store."""
        return self.token_format.page_tokens(self.layout.block_size)

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
        return AS_CACHED.decode(self.layout.read_keys(self.pages, pages), self.key_scale)

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
        return AS_CACHED.decode(self.layout.read_values(self.pages, pages), self.value_scale)

    def stored_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the keys of pages of stores.

        Args:
            pages: [...] int64.

        Returns:
            [..., page_tokens, D], a copy, of the type that the format decodes to.

        """
        if self.token_format.as_cached:
            return self.keys(pages)
        stored = self._stored(pages)[..., : self._part_bytes[0]]
        return self.token_format.decode(stored, self.key_scale)

    def stored_values(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the values of pages of stores, with the shape and dtype of :meth:`stored_keys`."""
        if self.token_format.as_cached:
            return self.values(pages)
        stored = self._stored(pages)[..., self._part_bytes[0] :]
        return self.token_format.decode(stored, self.value_scale)

    def move(
        self,
        source_page: torch.Tensor,
        source_slot: torch.Tensor,
        target_page: torch.Tensor,
        from_store: torch.Tensor | None = None,
    ) -> None:
        """Copy tokens to pages of a store, which they fill in order.

        All tokens are read before any is written, so targets may be among the sources. A token of
        a store is copied as it is.

        Args:
            source_page: [K] int64.
            source_slot: [K] int64, slot of each token in its page.
            target_page: [K / page_tokens] int64, without duplicates.
            from_store: [K] bool: True for tokens in pages of stores; None if there are none. Not
                read if the format is that of the cache.

        """
        if self.token_format.as_cached:
            self.layout.copy(self.pages, source_page, source_slot, target_page)
            return
        tokens = source_page.new_empty(len(source_page), sum(self._part_bytes), dtype=torch.uint8)
        old = torch.zeros_like(source_page, dtype=torch.bool) if from_store is None else from_store
        tokens[old] = self._stored(source_page[old])[torch.arange(int(old.sum())), source_slot[old]]
        tokens[~old] = self._encoded(source_page[~old], source_slot[~old])
        pages = self.pages.view(torch.uint8)
        filled = tokens.view(len(target_page), -1)
        pages[target_page, : filled.shape[1]] = filled

    @property
    def _part_bytes(self) -> tuple[int, int]:
        """Bytes of a stored key and of a stored value."""
        sizes = self.layout.keys.shape[1], self.layout.values.shape[1]
        key, value = (self.token_format.token_bytes(size, self.pages.itemsize) for size in sizes)
        return key, value

    def _stored(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the tokens of pages [...] of stores: [..., page_tokens, bytes] uint8, a copy."""
        size = sum(self._part_bytes)
        found = self.pages.view(torch.uint8)[pages][..., : self.page_tokens * size]
        return found.unflatten(-1, (self.page_tokens, size))

    def _encoded(self, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return the bytes [K, bytes] that tokens in other pages become in a store."""
        token = torch.arange(len(page), device=page.device)
        keys = self.layout.read_keys(self.pages, page)[token, slot]
        parts = [self.token_format.encode(keys, self.key_scale)]
        if not self.is_latent:
            values = self.layout.read_values(self.pages, page)[token, slot]
            parts.append(self.token_format.encode(values, self.value_scale))
        return torch.cat(parts, dim=-1)
