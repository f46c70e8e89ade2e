"""Tokens to record and (request, KV head) sequences of a step on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvevict.ops.triton.slices import Slices


@dataclass
class Recording:
    """K tokens with queries to record in the observation rings.

    ``tokens``, ``places`` (batch index of the request), ``back`` (tokens to the request's end,
    itself included) and ``slots`` (ring slot, -1 for none) are [K] int32, ``seq_lens`` is [batch]
    int32.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    back: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor


@dataclass
class Decode:
    """R requests with one query token each, evicted or not.

    ``rows``, ``places`` and ``tokens`` are [R] int32; ``query_start_loc`` [R * H + 1] int32 counts
    up by one. With ``slices``, the plan of all layers, the Triton decode kernel runs them, in
    ``stages``. Without ``slices``, they are ``in_order``, and FlashAttention runs them over a page
    table; ``lengths`` is [L, >= R * H] int32.
    """

    rows: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    in_order: bool
    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start_loc: torch.Tensor
    max_seq_len: int
    slices: Slices | None = None
    stages: int = 1


@dataclass
class Extend:
    """R evicted requests, some with several query tokens.

    ``order`` [queries] int64 is the index ``token * H + head`` in the batch of each query, ordered
    by sequence. ``table`` [R * H, V] int32 is written for each layer. ``parts`` are the calls of an
    optional kernel. ``starts`` is ``query_start_loc`` [R * H + 1] on the host, and ``longest`` an
    upper bound of the lengths.
    """

    rows: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start_loc: torch.Tensor
    table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    parts: Sequence[Any] = ()
    starts: Sequence[int] = ()
    longest: int = 0
