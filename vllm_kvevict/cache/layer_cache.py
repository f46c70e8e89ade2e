"""One layer's KV cache as evictions read it."""

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.cpu.packed import PackedPages
from vllm_kvevict.ops.cpu.pages import Pages
from vllm_kvevict.ops.fp8 import FP8, typed
from vllm_kvevict.ops.pieces import heads_at_once, joined, tokens_at_once
from vllm_kvevict.ops.token_format import AS_CACHED, PackedFormat, TokenFormat, groups


def _scaled(elements: torch.Tensor, scale: float) -> torch.Tensor:
    """Return keys or values that policies score: float32 for FP8, where uint8 holds it."""
    elements = typed(elements)
    return elements.float() * scale if elements.dtype == FP8 else elements


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
        centres: [H, D] float32: what is subtracted from a key before a store in few bits encodes
            it, None for nothing. See :mod:`vllm_kvevict.worker.centres`.

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
    centres: torch.Tensor | None = None

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
        return _scaled(self.layout.read_keys(self.pages, pages), self.key_scale)

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

    def key_sequences(
        self, pages: torch.Tensor, store_pages: int = 0, heads: slice = slice(None)
    ) -> torch.Tensor:
        """Return the keys of the pages of each head, concatenated.

        Args:
            pages: [H, P] int64, of a store first.
            store_pages: Number of pages of a store at the left of each row.
            heads: The KV heads of the rows, of all of the layer.

        Returns:
            [H, N, D], a copy, with N the tokens of P pages: of the type that the format decodes to
            if there are pages of a store, else float32 for an FP8 cache and the cache's dtype for
            others.

        """
        if not pages.numel():
            dtype = torch.float32 if self.is_fp8 else self.pages.dtype
            size = self.layout.keys.shape[1]
            return torch.empty(len(pages), 0, size, dtype=dtype, device=pages.device)
        if self.token_format.as_cached or not store_pages:
            return self.sequences(self.keys(pages))
        stored = self.stored_tokens(pages[:, :store_pages])[0].flatten(1, 2)
        if self.centres is not None:
            stored = stored.add_(self.centres[heads, None])
        return torch.cat([stored, self.sequences(self.keys(pages[:, store_pages:]))], dim=1)

    def value_sequences(self, pages: torch.Tensor, store_pages: int = 0) -> torch.Tensor:
        """Return the values of pages, with the arguments of :meth:`key_sequences`: [H, N, D]
        float32."""
        if self.token_format.as_cached or not store_pages:
            return self.sequences(self.values(pages)).float()
        stored = self.stored_tokens(pages[:, :store_pages])[1].flatten(1, 2)
        positional = self.sequences(self.values(pages[:, store_pages:])).float()
        return torch.cat([stored, positional], dim=1)

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
        return _scaled(self.layout.read_values(self.pages, pages), self.value_scale)

    def stored_tokens(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of pages of stores, keys without the centre of their head.

        Args:
            pages: [...] int64.

        Returns:
            [..., page_tokens, D] each, copies, of the type that the format decodes to.

        """
        if self.token_format.as_cached:
            keys = self.keys(pages)
            return keys, keys[..., :0] if self.is_latent else self.values(pages)
        return self.token_format.decode(self.stored_planes(pages))

    def tokens(
        self,
        page: torch.Tensor,
        slot: torch.Tensor,
        in_store: torch.Tensor,
        head: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of single tokens of stores and other pages.

        Args:
            page: [...] int64.
            slot: [...] int64 slots in these pages.
            in_store: [...] bool: True for tokens in pages of stores.
            head: [...] int64 KV heads, of a shape that can be expanded to that of ``page``.

        Returns:
            [..., D] float32 each.

        """
        size = self.layout.keys.shape[1]
        keys = torch.empty(*page.shape, size, device=page.device)
        values = torch.empty_like(keys)
        pages, place = page[in_store].unique(return_inverse=True)
        stored = slot[in_store]
        for found, all_pages in zip((keys, values), self.stored_tokens(pages), strict=True):
            found[in_store] = all_pages[place, stored].float()
        if self.centres is not None:
            keys[in_store] += self.centres[head.expand_as(page)[in_store]]
        pages, place = page[~in_store].unique(return_inverse=True)
        others = slot[~in_store]
        for found, all_pages in zip(
            (keys, values), (self.keys(pages), self.values(pages)), strict=True
        ):
            found[~in_store] = all_pages[place, others].float()
        return keys, values

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
        old = torch.zeros_like(source_page, dtype=torch.bool) if from_store is None else from_store
        found = [plane.new_empty(len(source_page), plane.shape[-1]) for plane in self.planes]
        if self.pages.is_cpu:
            self._read(source_page, source_slot, old, found)
        else:
            count = tokens_at_once(self.pages.device, 2 * self.layout.keys.shape[1])
            for begin in range(0, len(source_page), count):
                part = slice(begin, begin + count)
                parts = [tokens[part] for tokens in found]
                self._read_alike(source_page[part], source_slot[part], old[part], parts)
        for plane, tokens in zip(self.planes, found, strict=True):
            plane[target_page] = tokens.view(len(target_page), *plane.shape[1:])

    @cached_property
    def packed(self) -> PackedPages | None:
        """The pages as compiled attention on a CPU reads them; None unless stores are in few
        bits."""
        stored, (block_size, size) = self.token_format, self.layout.keys.shape
        if not isinstance(stored, PackedFormat) or not self.pages.is_cpu:
            return None
        pages = Pages(
            size,
            stored.key_bits,
            stored.value_bits,
            groups(size),
            self.page_tokens,
            block_size,
            self.stored.dtype,
            *self.layout.strides,
        )
        return PackedPages(
            pages,
            self.stored,
            stored.rotation(size, self.pages.device),
            (self.layout.keys, self.layout.values),
            self.scale,
            self.softcap,
            (self.key_scale, self.value_scale),
            self.sinks,
            self.centres,
        )

    @cached_property
    def planes(self) -> list[torch.Tensor]:
        """Views of all pages as those of stores: [num_pages, page_tokens, bytes] uint8 for each
        plane of the format."""
        whole, count, begin, views = self.pages.view(torch.uint8), self.page_tokens, 0, []
        for size in self.token_format.planes(self.layout.keys.shape[1]):
            end = begin + count * size
            views.append(whole[:, begin:end].unflatten(1, (count, size)))
            begin = end
        return views

    def stored_planes(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of pages [...] of stores, for each plane of the format: [...,
        page_tokens, bytes] uint8, copies."""
        found = [plane.index_select(0, pages.flatten()) for plane in self.planes]
        return [plane.unflatten(0, pages.shape) for plane in found]

    def _centred(self, keys: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """Return the keys [K, D] of tokens of pages [K] that are not of a store, as they are
        encoded."""
        if self.centres is None:
            return keys
        # Page h of a block is that of head h.
        return keys.float() - self.centres[page % len(self.centres)]

    def _read(
        self, page: torch.Tensor, slot: torch.Tensor, old: torch.Tensor, out: list[torch.Tensor]
    ) -> None:
        """Write tokens [K] as a store holds them to ``out``, [K, bytes] for each plane."""
        new, kept = (~old).nonzero().flatten(), old.nonzero().flatten()
        pages, place = page[new].unique_consecutive(return_inverse=True)
        keys, values = self.keys(pages)[place, slot[new]], self.values(pages)[place, slot[new]]
        encoded = self.token_format.encode(self._centred(keys, page[new]), values)
        for plane, fresh, tokens in zip(self.planes, encoded, out, strict=True):
            tokens[new] = fresh
            tokens[kept] = plane[page[kept], slot[kept]]

    def _read_alike(
        self, page: torch.Tensor, slot: torch.Tensor, old: torch.Tensor, out: list[torch.Tensor]
    ) -> None:
        """Do the same on a GPU, without sizes for which the host would wait.

        Every token is read both as one of a store and as one of another page.
        """
        assert self.layout.slot_size is not None, "vLLM's kernels for GPUs write whole tokens"
        others = self.pages.view(-1, self.layout.block_size, self.layout.slot_size)
        # A page of a store has more slots than other pages, so its slots may not exist there.
        tokens = others[page.masked_fill(old, 0), slot.masked_fill(old, 0)]
        keys, values = tokens.chunk(2, dim=-1)
        keys = self._centred(_scaled(keys, self.key_scale), page)
        encoded = self.token_format.encode(keys, _scaled(values, self.value_scale))
        for plane, fresh, found in zip(self.planes, encoded, out, strict=True):
            found.copy_(torch.where(old[:, None], plane[page, slot], fresh))
