"""What a published store is outside the KV cache: tensors that say nothing of where they lay."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.timeline.step_plan import StoreBlocks


class StoreContent:
    """Copies stores of one rank out of its KV cache and into it.

    A store is, for every KV-cache group G with blocks in it, ``G.split`` [L, H + 1] int32, its head
    split where something was kept, and of every layer I of the group ``G.I.pages``
    [blocks * H, bytes] uint8: keys, then values, token by token whatever the kernel's order in a
    page is; ``G.I.values`` [blocks * H, block_size, C] float32 where policies have numbers beside
    the cache.

    Args:
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        token_stats: Numbers beside the cached tokens, or None.

    """

    def __init__(
        self,
        states: Mapping[int, GroupState],
        caches: Mapping[str, LayerCache],
        token_stats: TokenStats | None,
    ) -> None:
        self.device = next(iter(caches.values())).pages.device
        self._states = states
        self._caches = caches
        self._page_values = token_stats
        self._orders = {
            name: torch.cat([c.layout.keys.flatten(), c.layout.values.flatten()]).to(c.pages.device)
            for name, c in caches.items()
        }

    def read(self, groups: Sequence[StoreBlocks]) -> Iterator[tuple[str, torch.Tensor]]:
        """A store's tensors by name, on the device, which is not waited for.

        One after the other: all of a long store at once could be more than the device has left.
        """
        for group in groups:
            state, pages = self._states[group.group_id], self._pages(group)
            if group.store:
                split = state.split_kept(group.store[0])
                yield f"{group.group_id}.split", split.clone()
            for index, name in enumerate(state.layer_names):
                elements = self._caches[name].pages[pages][:, self._orders[name]]
                yield f"{group.group_id}.{index}.pages", elements.view(torch.uint8)
                if self._page_values is not None:
                    values = self._page_values.layer(name)[pages]
                    yield f"{group.group_id}.{index}.values", values

    def write(self, groups: Sequence[StoreBlocks], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a store's tensors, which lie in host memory, into these blocks."""
        for group in groups:
            state, pages = self._states[group.group_id], self._pages(group)
            if group.store:
                split = state.split_kept(group.store[0])
                split.copy_(tensors[f"{group.group_id}.split"], non_blocking=True)
            for index, name in enumerate(state.layer_names):
                cache = self._caches[name].pages
                elements = tensors[f"{group.group_id}.{index}.pages"].view(cache.dtype)
                elements = elements.to(cache.device, non_blocking=True)
                moved = torch.empty_like(elements)
                moved[:, self._orders[name]] = elements
                cache[pages] = moved
                if self._page_values is not None:
                    values = tensors[f"{group.group_id}.{index}.values"]
                    layer = self._page_values.layer(name)
                    layer[pages] = values.to(cache.device, non_blocking=True)

    def _pages(self, group: StoreBlocks) -> torch.Tensor:
        """[blocks * H] int64 head pages of the blocks."""
        state = self._states[group.group_id]
        blocks = async_tensor_h2d(group.blocks, device=state.head_indptr.device, dtype=torch.int64)[
            :, None
        ]
        heads = torch.arange(state.num_heads, device=blocks.device)
        return (blocks * state.num_heads + heads).flatten()
