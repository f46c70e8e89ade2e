"""The size of a store outside the KV cache, and the expected shapes of its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.rules.rule import EvictionRule, blocks_for
from vllm_kvevict.stores.key import ShareKey


@dataclass(frozen=True)
class GroupShape:
    """The part of a store in one KV-cache group, in blocks."""

    tail_start: int
    store: int
    tail: int

    @property
    def blocks(self) -> int:
        return self.store + self.tail


def group_shapes(key: ShareKey, rules: Mapping[int, EvictionRule]) -> dict[int, GroupShape]:
    """Return the shape of the store of a key in every group that evicts.

    Args:
        key: The key.
        rules: Eviction rules of a request with this key. The number of recent tokens depends on its
            policy.

    """
    shapes, tails = {}, dict(key.tails)
    for group, store in key.stores:
        rule = rules[group]
        tail_start = tails.get(group, rule.tail_start(key.point) if store else 0)
        tail = blocks_for(key.point, rule.block_size) - tail_start // rule.block_size
        shapes[group] = GroupShape(tail_start, store, tail)
    return shapes


@dataclass(frozen=True)
class StoreSizes:
    """Sizes and checks of one rank's part of stores.

    Args:
        specs: Spec of every KV-cache group.
        layers: Layers of every group.
        channels: float32 statistics per cached token of the groups that evict.
        token_format: Format of stored tokens.
        pinned: True if host memory is pinned. PyTorch allocates pinned memory in powers of two.
        windows: For each group whose layers attend within a window, a function that returns the
            number of tokens at the start that the token after so many tokens does not read.

    """

    specs: Mapping[int, AttentionSpec]
    layers: Mapping[int, int]
    channels: int
    pinned: bool = False
    token_format: TokenFormat = AS_CACHED
    windows: Mapping[int, Callable[[int], int]] = field(default_factory=dict)

    def shapes(self, key: ShareKey, rules: Mapping[int, EvictionRule]) -> dict[int, GroupShape]:
        """Return the shape of the store of a key in every group; arguments as for
        :func:`group_shapes`."""
        shapes = group_shapes(key, rules)
        for group, skipped in self.windows.items():
            size = self.specs[group].block_size
            first = skipped(key.point) // size
            shapes[group] = GroupShape(first * size, 0, blocks_for(key.point, size) - first)
        return shapes

    def host_bytes(self, shapes: Mapping[int, GroupShape]) -> int:
        """Return the bytes of host memory for a store's tensors."""
        sizes = self._bytes(shapes)
        return sum(1 << (size - 1).bit_length() for size in sizes) if self.pinned else sum(sizes)

    def num_bytes(self, shapes: Mapping[int, GroupShape]) -> int:
        """Return the bytes of a store's tensors."""
        return sum(self._bytes(shapes))

    def _bytes(self, shapes: Mapping[int, GroupShape]) -> list[int]:
        tensors = self._expected(shapes).values()
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors]

    def check(self, shapes: Mapping[int, GroupShape], tensors: Mapping[str, torch.Tensor]) -> None:
        """Check tensors that come from a file.

        Raises:
            ValueError: The tensors are not a store of these shapes.

        """
        actual = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        if actual != self._expected(shapes):
            raise ValueError("its tensors are not those of this store")
        for group, shape in shapes.items():
            if shape.store:
                split = tensors[f"{group}.split"]
                pages = shape.store * self.specs[group].num_kv_heads
                ends = bool((split[:, 0] == 0).all()) and bool((split[:, -1] == pages).all())
                if not ends or bool((split.diff(dim=1) < 0).any()):
                    raise ValueError("its heads do not share its pages")

    def _expected(
        self, shapes: Mapping[int, GroupShape]
    ) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        expected: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for group, shape in shapes.items():
            spec, layers = self.specs[group], self.layers[group]
            pages = shape.blocks * spec.num_kv_heads
            num_elements, itemsize = spec.head_size + spec.head_size_v, get_dtype_size(spec.dtype)
            evicts = group not in self.windows
            stored = self.token_format if evicts else AS_CACHED
            size = stored.page_bytes(spec.block_size, num_elements, itemsize)
            page_tokens = stored.page_tokens(spec.block_size)
            if shape.store:
                expected[f"{group}.split"] = (layers, spec.num_kv_heads + 1), torch.int32
            for index in range(layers):
                expected[f"{group}.{index}.pages"] = (pages, size), torch.uint8
                if self.channels and evicts:
                    values = (pages, page_tokens, self.channels), torch.float32
                    expected[f"{group}.{index}.values"] = values
        return expected
