"""The content of a published store outside the KV cache, as tensors independent of block
positions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.rules.step_plan import StoreBlocks


@dataclass(frozen=True)
class WindowGroup:
    """A KV-cache group whose layers attend within a window.

    Args:
        layer_names: Its layers, in order.
        num_heads: H, KV heads on this rank.

    """

    layer_names: Sequence[str]
    num_heads: int


class StoreContent:
    """Copies stores of one rank out of its KV cache and into it.

    For every KV-cache group G with blocks, a store consists of ``G.split`` [L, H + 1] int32, the
    head split, if tokens were kept, and for every layer I of the group ``G.I.pages`` [blocks * H,
    bytes] uint8. A page of kept tokens is as the format of stored tokens has it; if that is the
    cache's, and in all other pages, these are keys, then values, token by token in order,
    independent of the kernel's order inside a page. If policies keep statistics per token,
    ``G.I.values`` [blocks * H, page_tokens, C] float32 holds those of a group that evicts.

    Args:
        states: Device state of every group that evicts, by group id.
        caches: The caches of the layers of all groups by name.
        token_stats: Statistics of the cached tokens, or None.
        windows: Groups whose layers attend within a window, by group id.

    """

    def __init__(
        self,
        states: Mapping[int, GroupState],
        caches: Mapping[str, LayerCache],
        token_stats: TokenStats | None,
        windows: Mapping[int, WindowGroup] | None = None,
    ) -> None:
        self.device = next(iter(caches.values())).pages.device
        self._states = states
        self._groups: dict[int, GroupState | WindowGroup] = {**states, **(windows or {})}
        self._caches = caches
        self._token_stats = token_stats
        self._orders = {
            name: torch.cat([c.layout.keys.flatten(), c.layout.values.flatten()]).to(c.pages.device)
            for name, c in caches.items()
        }
        self._places = {name: order.argsort() for name, order in self._orders.items()}

    def read(self, groups: Sequence[StoreBlocks]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a store with their names, on the device, without waiting for it.

        They are yielded one by one, since a whole long store could exceed the free memory of the
        device.
        """
        for group in groups:
            pages, stats = self._pages(group), self._stats(group)
            if group.store:
                split = self._states[group.group_id].split_kept(group.store[0])
                yield f"{group.group_id}.split", split.clone()
            for index, name in enumerate(self._groups[group.group_id].layer_names):
                # On a CPU, indexing both dimensions with tensors takes several times as long.
                elements = self._caches[name].pages.index_select(0, pages)
                elements = self._reordered(name, elements, self._orders[name], group)
                yield f"{group.group_id}.{index}.pages", elements.view(torch.uint8)
                if stats is not None:
                    values = stats.layer(name).index_select(0, pages)
                    yield f"{group.group_id}.{index}.values", values

    def write(self, groups: Sequence[StoreBlocks], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a store, which are in host memory, into these blocks."""
        for group in groups:
            pages, stats = self._pages(group), self._stats(group)
            if group.store:
                split = self._states[group.group_id].split_kept(group.store[0])
                split.copy_(tensors[f"{group.group_id}.split"], non_blocking=True)
            for index, name in enumerate(self._groups[group.group_id].layer_names):
                cache = self._caches[name].pages
                elements = tensors[f"{group.group_id}.{index}.pages"].view(cache.dtype)
                elements = elements.to(cache.device, non_blocking=True)
                elements = self._reordered(name, elements, self._places[name], group)
                cache.index_copy_(0, pages, elements)
                if stats is not None:
                    values = tensors[f"{group.group_id}.{index}.values"]
                    layer = stats.layer(name)
                    layer.index_copy_(0, pages, values.to(cache.device, non_blocking=True))

    def _reordered(
        self, name: str, elements: torch.Tensor, order: torch.Tensor, group: StoreBlocks
    ) -> torch.Tensor:
        """Return pages with their elements in another order, if it is the kernel's."""
        if self._caches[name].token_format.as_cached:
            return elements.index_select(1, order)
        kept = len(group.store) * self._groups[group.group_id].num_heads
        return torch.cat([elements[:kept], elements[kept:].index_select(1, order)])

    def _pages(self, group: StoreBlocks) -> torch.Tensor:
        """Return the head pages of the blocks, [blocks * H] int64."""
        num_heads = self._groups[group.group_id].num_heads
        blocks = async_tensor_h2d(group.blocks, device=self.device, dtype=torch.int64)[:, None]
        heads = torch.arange(num_heads, device=blocks.device)
        return (blocks * num_heads + heads).flatten()

    def _stats(self, group: StoreBlocks) -> TokenStats | None:
        """Return the statistics of a group's tokens; None if it keeps none."""
        return self._token_stats if group.group_id in self._states else None
