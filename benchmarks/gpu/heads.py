"""A decode step of evicted requests with uneven heads, as tensors of all its layers."""

from dataclasses import dataclass

import torch

from vllm_kvevict.attention.scratch import BEFORE_SEQUENCE, MIN_SLICE, Scratch, Shape
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.ops.triton.decode import Ring, decode_attention
from vllm_kvevict.ops.triton.observe import observe_tokens
from vllm_kvevict.ops.triton.page_table import write_page_table
from vllm_kvevict.ops.triton.slices import Slices, head_lengths, plan_slices

CACHE_BYTES = 8 * 2**30
"""Most bytes of the caches; layers share them in turn where they are more than fit."""
WINDOW = 32
"""Queries in a ring slot."""


@dataclass
class Step:
    """R requests, each with a store of S blocks and a tail; one query token each.

    Every layer has other heads, and its queries are recorded for every request.

    Args:
        requests: R.
        budget: Tokens per head in the store, on average; a multiple of the tokens of its pages.
        tail: Tokens behind the tail start.
        shape: KV heads, query heads per KV head, head size, block size.
        dtype: Of queries and cache.
        device: Where.
        equal: Give every head as many pages.
        sigma: Standard deviation of the logarithm of a head's share of the store.
        layers: Of a model, whose lengths and plans of work are made together.
        cache_bytes: As :data:`CACHE_BYTES`.
        stored: Format of the tokens of stores.

    """

    requests: int
    budget: int
    tail: int
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    equal: bool = False
    sigma: float = 1.0
    layers: int = 32
    cache_bytes: int = CACHE_BYTES
    stored: TokenFormat = AS_CACHED

    def __post_init__(self) -> None:
        heads, page = self.shape.num_heads, self.shape.block_size
        self.page_tokens = self.stored.page_tokens(page)
        if self.budget % self.page_tokens:
            raise ValueError(
                f"a budget of {self.budget} is no multiple of {self.page_tokens} tokens"
            )
        self.store_blocks = self.budget // self.page_tokens
        self.tail_blocks = -(-self.tail // page)
        per_request = self.store_blocks + self.tail_blocks
        blocks = self.requests * per_request + 1
        content = 2 * self.shape.head_size
        shape = (blocks, heads, page, content)
        on = dict(dtype=self.dtype, device=self.device)
        count = self.cache_bytes // (blocks * heads * page * content * self.dtype.itemsize)
        self.caches = [torch.randn(shape, **on) for _ in range(min(self.layers, max(1, count)))]
        if not self.stored.as_cached:
            # Random bytes are no scales.
            for cache in self.caches:
                cache.view(torch.float16).fill_(0.01)
        rand = torch.Generator().manual_seed(0)
        ids = torch.randperm(blocks - 1, generator=rand).view(self.requests, per_request) + 1
        numbers = dict(dtype=torch.int32, device=self.device)
        self.stores = ids[:, : self.store_blocks].to(**numbers).contiguous()
        tail_start = 4 * self.budget
        self.tail_start = torch.full((self.requests,), tail_start, **numbers)
        self.seq_lens = self.tail_start + self.tail
        first = tail_start // page
        self.block_table = torch.zeros(self.requests, first + self.tail_blocks, **numbers)
        self.block_table[:, first:] = ids[:, self.store_blocks :].to(**numbers)
        splits = [
            page_split(self.requests, heads, self.store_blocks, rand, self.equal, self.sigma)
            for _ in range(self.layers)
        ]
        self.head_indptr = torch.stack(splits).to(**numbers)
        self.rows = torch.arange(self.requests, **numbers)
        self.lengths = torch.zeros(self.layers, self.requests * heads, **numbers)
        self.equal_table = ids.to(**numbers)
        query_heads = heads * self.shape.group
        query = (self.requests, query_heads, self.shape.head_size)
        self.query = torch.randn(query, **on)
        entries = (self.requests * WINDOW, query_heads, self.shape.head_size)
        self.rings = [torch.zeros(entries, **on) for _ in self.caches]
        self.back = torch.ones_like(self.rows)
        self.out = torch.empty_like(self.query)
        self.flash = Scratch("flash", self.shape, self.device)
        self.triton = Scratch("triton", self.shape, self.device, self.stored)
        self.centres = torch.zeros(heads, self.shape.head_size, device=self.device)
        sequences = self.requests * heads
        self.slices = Slices.room(self.layers, sequences, self.triton.programs, self.device)
        self.stages = self.triton.stages(sequences)

    @property
    def num_bytes(self) -> int:
        """Keys and values that a layer must read."""
        size = self.shape.head_size
        plain = 2 * size * self.dtype.itemsize
        stored = plain if self.stored.as_cached else sum(self.stored.planes(size))
        heads = self.requests * self.shape.num_heads
        return heads * (self.budget * stored + self.tail * plain)

    @property
    def scale(self) -> float:
        return self.shape.head_size**-0.5

    def cache(self, layer: int) -> torch.Tensor:
        """[blocks, KV heads, block size, 2 * D] of a layer."""
        return self.caches[layer % len(self.caches)]

    def measure(self) -> None:
        """Lengths of all heads, once a step for all layers, as FlashAttention needs them."""
        head_lengths(
            self.rows, self.rows, self.seq_lens, self.tail_start, self.head_indptr, self.lengths,
            self.page_tokens,
        )  # fmt: skip

    def plan(self) -> None:
        """The plan of work of our kernel, once a step for all layers."""
        plan_slices(
            self.rows, self.rows, self.rows, self.seq_lens, self.tail_start, self.head_indptr,
            self.slices, self.shape.block_size, self.page_tokens, MIN_SLICE,
            BEFORE_SEQUENCE,
        )  # fmt: skip

    def attend(self, layer: int) -> None:
        """Our decode kernel, which records the queries too."""
        decode_attention(
            self.query, self.cache(layer), self.out, self.stores, self.block_table, self.slices,
            layer, self.triton.partials, self.scale, 0.0, self.stages,
            ring=self.ring(layer), packed=self.triton.packed, centres=self.centres,
        )  # fmt: skip

    def run_triton(self) -> None:
        """A whole step of our kernel."""
        self.plan()
        for layer in range(self.layers):
            self.attend(layer)

    def ring(self, layer: int) -> Ring:
        """The ring entries of a layer."""
        return Ring(self.rings[layer % len(self.rings)], self.rows, self.seq_lens, WINDOW)

    def observe(self, layer: int) -> None:
        """The queries recorded by a launch of its own, as with xformers."""
        observe_tokens(
            self.rings[layer % len(self.rings)], self.query, self.seq_lens, self.rows, self.rows,
            self.back, self.rows, WINDOW,
        )  # fmt: skip

    def write_table(
        self, layer: int, table: torch.Tensor | None = None, record: bool = False
    ) -> torch.Tensor:
        """The page table of a layer: ``table``, or FlashAttention's; with the queries recorded."""
        if table is None:
            table = self.flash.table[: self.requests * self.shape.num_heads]
        write_page_table(
            self.rows, self.rows, self.tail_start, self.stores, self.head_indptr[layer],
            self.block_table, self.lengths[layer], table, self.shape.block_size,
            self.shape.block_size, *((self.query, self.ring(layer)) if record else ()),
        )  # fmt: skip
        return table


def page_split(
    requests: int,
    heads: int,
    store_blocks: int,
    rand: torch.Generator,
    equal: bool = False,
    sigma: float = 1.0,
) -> torch.Tensor:
    """[R, H + 1] pages: log-normal shares, at least one each, as adaptive budgets look."""
    total = store_blocks * heads
    if equal:
        pages = torch.full((requests, heads), store_blocks)
    else:
        share = (sigma * torch.randn(requests, heads, generator=rand)).exp()
        share = share / share.sum(1, keepdim=True) * (total - heads)
        pages = 1 + share.long()
        pages[:, 0] += total - pages.sum(1)
    indptr = torch.zeros(requests, heads + 1, dtype=torch.int64)
    indptr[:, 1:] = pages.cumsum(1)
    return indptr
