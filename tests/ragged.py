"""Batches of evicted and other requests, drawn at random, and what attention must make of them.

The expectation walks Python lists of pages, one head at a time, in float64.
"""

from dataclasses import dataclass, replace

import torch

from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat


@dataclass
class Ragged:
    """R requests whose heads own uneven numbers of store pages, on any device."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    stores: torch.Tensor
    head_indptr: torch.Tensor
    block_table: torch.Tensor
    cache: torch.Tensor
    block_size: int
    stored: TokenFormat = AS_CACHED
    centres: torch.Tensor | None = None

    @property
    def num_layers(self) -> int:
        return self.head_indptr.shape[0]

    @property
    def num_heads(self) -> int:
        return self.head_indptr.shape[2] - 1

    def to(self, device: str) -> "Ragged":
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return Ragged(**moved)

    def quantised(self, key_scale: float, value_scale: float) -> tuple["Ragged", "Ragged"]:
        """The batch over an FP8 cache, as vLLM's uint8, and over what that cache stands for."""
        scales = torch.tensor([key_scale, value_scale])
        scales = scales.repeat_interleave(self.cache.shape[-1] // 2)
        stored = (self.cache.float() / scales).to(torch.float8_e4m3fn)
        meant = (stored.float() * scales).to(self.cache.dtype)
        fields = vars(self)
        return Ragged(**fields | {"cache": stored.view(torch.uint8)}), Ragged(
            **fields | {"cache": meant}
        )

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of a store."""
        return self.stored.page_tokens(self.block_size)

    def packed(self, stored: TokenFormat, seed: int = 0, size: float = 1.0) -> "Ragged":
        """The batch with random tokens of another format in its stores, and values of a size.

        The centres of keys are as large as what is left of them.
        """
        rand = torch.Generator().manual_seed(seed)
        centres = torch.randn(self.num_heads, self.cache.shape[3] // 2, generator=rand)
        cache, dim = self.cache.clone(), self.cache.shape[3] // 2
        cache[..., dim:] *= size
        pages = cache.view(torch.uint8).flatten(2)
        sizes = stored.page_tokens(self.block_size), dim
        for row in self.tail_start.nonzero().flatten().tolist():
            for block in self.stores[row].tolist():
                for head in range(self.num_heads):
                    drawn = [torch.randn(sizes, generator=rand) for _ in range(2)]
                    keys, values = drawn[0], drawn[1] * size
                    planes = torch.cat([plane.flatten() for plane in stored.encode(keys, values)])
                    pages[block, head] = 255
                    pages[block, head, : len(planes)] = planes
        return replace(self, cache=cache, stored=stored, centres=centres)

    def tokens(self, layer: int, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, D] keys and values of a sequence, float64."""
        pages, flat = self.pages(layer, request, head), self.cache.cpu().flatten(0, 1)
        length, kept = self.length(layer, request, head), self.kept(layer, request, head)
        if self.stored.as_cached:
            kept = 0
        tail = flat[pages[kept:]].flatten(0, 1)[: length - kept * self.page_tokens].double()
        keys, values = tail.chunk(2, dim=-1)
        if kept:
            whole, begin, planes = flat.view(torch.uint8).flatten(1)[pages[:kept]], 0, []
            for size in self.stored.planes(keys.shape[1]):
                end = begin + self.page_tokens * size
                planes.append(whole[:, begin:end].reshape(-1, size))
                begin = end
            stored = self.stored.decode(planes)
            if self.centres is not None:
                stored = stored[0] + self.centres[head].cpu(), stored[1]
            keys, values = (
                torch.cat([old.double(), new])
                for old, new in zip(stored, (keys, values), strict=True)
            )
        return keys, values

    def kept(self, layer: int, request: int, head: int) -> int:
        """Pages of the store of a sequence."""
        row = int(self.rows[request])
        tail = int(self.tail_start[row]) if row >= 0 else 0
        return int(self.head_indptr[layer, row].diff()[head]) if tail else 0

    def pages(self, layer: int, request: int, head: int) -> list[int]:
        """Physical head pages of one sequence, and no page beyond its length."""
        row = int(self.rows[request])
        tail = int(self.tail_start[row]) if row >= 0 else 0
        pages = []
        if tail:
            first, last = self.head_indptr[layer, row, head : head + 2].tolist()
            for flat in range(first, last):
                block = int(self.stores[row, flat // self.num_heads])
                pages.append(block * self.num_heads + flat % self.num_heads)
        for token in range(tail, int(self.seq_lens[request]), self.block_size):
            block = int(self.block_table[request, token // self.block_size])
            pages.append(block * self.num_heads + head)
        return pages

    def length(self, layer: int, request: int, head: int) -> int:
        row = int(self.rows[request])
        tail = int(self.tail_start[row]) if row >= 0 else 0
        kept = self.kept(layer, request, head)
        return int(self.seq_lens[request]) - tail + kept * self.page_tokens

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[R, query heads, D] float64 for ``query`` [R, query heads, D]; 0 without keys.

        ``sinks`` [query heads] are learned: each is a logit without a value.
        """
        group = query.shape[1] // self.num_heads
        out = torch.zeros(query.shape, dtype=torch.float64)
        for request in range(len(self.rows)):
            for head in range(self.num_heads):
                length = self.length(layer, request, head)
                if not length:
                    continue
                keys, values = self.tokens(layer, request, head)
                mine = slice(head * group, (head + 1) * group)
                logits = query[request, mine].cpu().double() @ keys.T * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                weights = logits.exp()
                whole = weights.sum(-1, keepdim=True)
                if sinks is not None:
                    whole += sinks[mine, None].cpu().double().exp()
                out[request, mine] = weights / whole @ values
        return out


def random_ragged(
    seed: int,
    dtype: torch.dtype = torch.float32,
    requests: int = 4,
    heads: int = 2,
    dim: int = 32,
    block_size: int = 16,
    layers: int = 2,
    store_blocks: int = 3,
    longest_tail: int = 70,
    padding: int = 0,
    evicted_share: float = 0.7,
) -> Ragged:
    """A batch in which every slot that no sequence may read holds NaN."""
    rand = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rand))

    num_rows = requests + 2
    rows = torch.randperm(num_rows, generator=rand)[:requests].to(torch.int32)
    tail_start = torch.zeros(num_rows, dtype=torch.int32)
    seq_lens = torch.zeros(requests + padding, dtype=torch.int32)
    stores = torch.zeros(num_rows, store_blocks, dtype=torch.int32)
    # Stale splits of earlier requests stay behind in the rows of those that are not evicted.
    head_indptr = torch.full((layers, num_rows, heads + 1), 7, dtype=torch.int32)
    width = (store_blocks + 2) * heads + longest_tail // block_size + 2
    block_table = torch.zeros(requests + padding, width, dtype=torch.int32)
    next_block = 1
    for request, row in enumerate(rows.tolist()):
        length = number(1, longest_tail)
        if number(0, 99) < evicted_share * 100:
            tail_start[row] = block_size * number(store_blocks + 1, (store_blocks + 1) * heads)
            stores[row] = torch.arange(next_block, next_block + store_blocks)
            next_block += store_blocks
            for layer in range(layers):
                # At least one page each; the others go where they fall.
                pages = torch.ones(heads, dtype=torch.int32)
                for _ in range(store_blocks * heads - heads):
                    pages[number(0, heads - 1)] += 1
                head_indptr[layer, row] = torch.tensor([0, *pages.cumsum(0).tolist()])
        start = int(tail_start[row])
        seq_lens[request] = start + length
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            block_table[request, block] = next_block
            next_block += 1
    shape = (next_block, heads, block_size, 2 * dim)
    cache = torch.randn(shape, generator=rand).to(dtype)
    rows = torch.cat([rows, torch.full((padding,), -1, dtype=torch.int32)])
    batch = Ragged(rows, seq_lens, tail_start, stores, head_indptr, block_table, cache, block_size)
    readable = torch.zeros(shape[0] * heads, block_size, dtype=torch.bool)
    for layer in range(layers):
        for request in range(requests):
            for head in range(heads):
                pages = batch.pages(layer, request, head)
                slots = torch.arange(len(pages) * block_size).view(-1, block_size)
                readable[pages] |= slots < batch.length(layer, request, head)
    cache.flatten(0, 1)[~readable] = float("nan")
    return batch
