"""The format of a stored token: the one place that knows it.

A page of a store has the bytes of a page of vLLM's cache, ``block_size`` tokens of one head in the
cache's type. How many tokens a store's page holds, how many bytes each takes, and how keys and
values become these bytes, is defined here. The arithmetic of budgets (through ``page_tokens`` of
:class:`~vllm_kvevict.rules.rule.EvictionRule`), the cache, stores in memory and files, and
``vllm-kvevict plan`` ask a :class:`TokenFormat`.

The format of a server is :attr:`~vllm_kvevict.config.config.EvictionConfig.token_format`, which is
:data:`AS_CACHED` for all servers. This module imports torch only when tokens are encoded, so that
configurations are read without it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class TokenFormat:
    """Stored tokens as vLLM wrote them: in the type of the cache, FP8 with one scale per layer
    included.

    Keys and values are encoded and decoded token by token. A subclass states another format; the
    tokens of its pages follow one another, keys before values.
    """

    name = "cache"
    """Name in the fingerprint of files."""

    as_cached = True
    """True if a store's page has the layout of all other pages, which vLLM's kernels read. A token
    is then moved as it is."""

    def page_tokens(self, block_size: int) -> int:
        """Return the tokens in a page of a store, a multiple of ``block_size``.

        Args:
            block_size: Tokens in a page of vLLM's cache, which has the same bytes.

        """
        return block_size

    def token_bytes(self, num_elements: int, itemsize: int) -> int:
        """Return the bytes of a stored token of one head.

        Args:
            num_elements: Elements of its key and its value.
            itemsize: Bytes of an element of vLLM's cache.

        """
        return num_elements * itemsize

    def page_bytes(self, block_size: int, num_elements: int, itemsize: int) -> int:
        """Return the bytes of a page, of a store or not.

        Args:
            block_size: Tokens in a page of vLLM's cache.
            num_elements: Elements of the key and the value of a token.
            itemsize: Bytes of an element of vLLM's cache.

        Raises:
            ValueError: The tokens of a store's page do not fit into it.

        """
        size = block_size * num_elements * itemsize
        if self.page_tokens(block_size) * self.token_bytes(num_elements, itemsize) > size:
            raise ValueError(f"pages of {block_size} tokens do not hold those of {self.name}")
        return size

    def encode(self, elements: "torch.Tensor", scale: float) -> "torch.Tensor":
        """Return keys or values as they are stored.

        Args:
            elements: [..., D] elements of vLLM's cache; uint8 holds FP8.
            scale: Factor from an element to the key or value.

        Returns:
            [..., bytes] uint8.

        """
        import torch

        return elements.contiguous().view(torch.uint8)

    def decode(self, stored: "torch.Tensor", scale: float) -> "torch.Tensor":
        """Return keys or values that policies score.

        Args:
            stored: What is stored: elements of the cache in its type if :attr:`as_cached`, where
                uint8 holds FP8; otherwise [..., bytes] uint8.
            scale: Factor from an element of vLLM's cache to the key or value.

        Returns:
            Floating-point elements: float32 for FP8 and other formats, else in the cache's type.

        """
        from vllm_kvevict.ops.fp8 import FP8, typed

        elements = typed(stored)
        return elements.float() * scale if elements.dtype == FP8 else elements


AS_CACHED = TokenFormat()
