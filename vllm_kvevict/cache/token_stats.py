"""Floats that a policy keeps for every cached token.

They lie in a tensor ``[num_blocks * H, page_tokens, C]`` for each layer and move with the tokens.
Any page may become one of a store, so each has floats for ``page_tokens`` tokens; other pages use
the first ``block_size``. Each rank gives vLLM's KV cache only its share of the memory, ``page /
(page + H * page_tokens * C * 4)``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_kvevict.cache.layer_cache import LayerCache


class TokenStats:
    """C float32 numbers for every token of every head page, with the addresses of the KV cache.

    Layers that share cache memory share this memory as well: vLLM's KV-cache groups use the same
    tensors, because a block belongs to one group at a time. Blocks are reused, so the floats of a
    slot are undefined until :meth:`reset`, :meth:`move` or :meth:`write` sets them.

    Args:
        caches: The caches of all evictable layers on this rank, by name.
        num_heads: H of each of these layers.
        channels: C.

    """

    def __init__(
        self, caches: Mapping[str, "LayerCache"], num_heads: Mapping[str, int], channels: int
    ) -> None:
        sizes: dict[int, int] = {}
        shapes, places = {}, {}
        for name, cache in caches.items():
            place = cache.pages.data_ptr()
            slots = cache.pages.shape[0] * cache.page_tokens
            sizes[place] = max(sizes.get(place, 0), slots * channels)
            shapes[name] = (cache.pages.shape[0], cache.page_tokens, channels)
            places[name] = (place, slots * channels, cache.pages.device)
        memory = {
            place: torch.zeros(sizes[place], device=device) for place, _, device in places.values()
        }
        self.num_bytes = sum(size * torch.float32.itemsize for size in sizes.values())
        self._num_heads = dict(num_heads)
        self._block_sizes = {name: cache.layout.block_size for name, cache in caches.items()}
        self._layers = {
            name: memory[place][:size].view(shapes[name])
            for name, (place, size, _) in places.items()
        }

    def layer(self, layer_name: str) -> torch.Tensor:
        """Return a view of the floats of one layer: [num_blocks * H, page_tokens, C] float32."""
        return self._layers[layer_name]

    def reset(self, layer_name: str, slots: torch.Tensor) -> None:
        """Zero the floats of tokens that are new in the cache, for every head.

        Args:
            layer_name: An evictable layer.
            slots: [T] int64, vLLM's slot mapping of these tokens, ``block * block_size + slot``.

        """
        values, block_size = self._layers[layer_name], self._block_sizes[layer_name]
        by_block = values.unflatten(0, (-1, self._num_heads[layer_name]))
        by_block[slots // block_size, :, slots % block_size] = 0

    def move(
        self,
        layer_name: str,
        source_page: torch.Tensor,
        source_slot: torch.Tensor,
        target_page: torch.Tensor,
    ) -> None:
        """Copy the floats of tokens to pages, as their keys and values are copied.

        Args:
            layer_name: An evictable layer.
            source_page: [K] int64.
            source_slot: [K] int64, slot of each token in its page.
            target_page: [K / page_tokens] int64 pages of a store, without duplicates; may be among
                the sources.

        """
        values = self._layers[layer_name]
        moved = values[source_page, source_slot]
        values[target_page] = moved.view(-1, *values.shape[1:])

    def keep(
        self,
        layer_names: Sequence[str],
        made: torch.Tensor,
        columns: torch.Tensor,
        pages: torch.Tensor,
        target_page: torch.Tensor,
    ) -> None:
        """Write the floats of the tokens that an eviction keeps, in L layers.

        Args:
            layer_names: The layers of a group.
            made: [L, H, N, C] floats of every candidate.
            columns: [L, S * H * page_tokens] int64 kept candidates, heads concatenated.
            pages: [L, H] int64 pages of each head.
            target_page: [S * H] int64 head pages that the tokens move to.

        """
        tokens = pages.flatten() * self._layers[layer_names[0]].shape[1]
        rows = torch.arange(len(tokens), device=pages.device)
        rows = rows.repeat_interleave(tokens, output_size=columns.numel())
        floats = made.flatten(0, 1)[rows, columns.flatten()]
        for name, kept in zip(layer_names, floats.unflatten(0, columns.shape), strict=True):
            self.write(name, kept, target_page)

    def write(self, layer_name: str, floats: torch.Tensor, target_page: torch.Tensor) -> None:
        """Write the first floats of all tokens of pages.

        Args:
            layer_name: An evictable layer.
            floats: [K, at most C] float32 of the tokens, in order.
            target_page: [K / page_tokens] int64 pages of a store.

        """
        values, floats_per_token = self._layers[layer_name], floats.shape[-1]
        pages = floats.view(-1, values.shape[1], floats_per_token)
        values[target_page, :, :floats_per_token] = pages
