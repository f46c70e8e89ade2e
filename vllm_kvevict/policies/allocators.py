"""Allocators, which divide the pages of a layer between its KV heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvevict.ops.torch.allocate import adaptive_pages, shared_pages, uniform_pages
from vllm_kvevict.policies.base import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """S pages for every head, or pages in proportion to measured shares of the heads."""

    follows_shares: ClassVar[bool] = True

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
    """The pages of a layer with the highest scores, in any head (Ada-KV Algorithm 2).

    Measured shares of the heads are not used.

    Args:
        floor: Share of S in [0, 1] that every head keeps. 0.2 is the safeguard of the paper's
            released code and of kvpress; 0.8 keeps at least as much as the paper's a = 0.2.

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
        return adaptive_pages(scores, caps, store_blocks, block_size, self.floor)
