"""How the pages of a layer are shared between its KV heads."""

from dataclasses import dataclass

import torch

from vllm_kvevict.ops.reference.allocate import adaptive_pages, shared_pages, uniform_pages
from vllm_kvevict.policies.base import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """The same S pages for every head, or fixed shares of them."""

    def pages(
        self,
        scores: torch.Tensor,
        caps: torch.Tensor,
        store_blocks: int,
        block_size: int,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if shares is None:
            return uniform_pages(caps, store_blocks)
        return shared_pages(shares, caps, store_blocks)


@dataclass(frozen=True)
class Adaptive(Allocator):
    """The best pages of a layer, whichever head they are in (Ada-KV Algorithm 2).

    Args:
        floor: Share of S in [0, 1] that every head keeps, on average where heads have fixed
            shares, which then share it out. 0.2 is the safeguard of the paper's
            released code and of kvpress; 0.8 keeps at least what the paper prints with a = 0.2.

    """

    floor: float = 0.2

    def pages(
        self,
        scores: torch.Tensor,
        caps: torch.Tensor,
        store_blocks: int,
        block_size: int,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return adaptive_pages(scores, caps, store_blocks, block_size, self.floor, shares)
