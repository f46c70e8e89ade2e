"""Attention on the CPU over stores in a format of their own.

vLLM's kernel reads pages in the cache's type only. A store's pages are unpacked here, a few at a
time, and the parts of a sequence are merged by their maxima and sums. Steps with one query token a
request run compiled code (``ops/cpu/packed.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState

ELEMENTS = 2**20
"""Maximum number of float32 elements of an intermediate result."""

LEAST = -1e30
"""Maximum logit of a page that no query attends to: finite, so that its weight is 0 and not NaN."""


def warm_up(cache: LayerCache) -> None:
    """Compile what evictions and decode steps over stores run, before there is a request.

    Nothing is written.
    """
    if cache.packed is None:
        return
    size = cache.layout.keys.shape[1]
    cache.token_format.encode(torch.zeros(1, size), torch.zeros(1, size))
    heads = 1 if cache.sinks is None else len(cache.sinks)
    group = 1 if cache.sinks is None else cache.sinks.shape[1]
    one = np.ones(heads, np.int64)
    cache.packed.decode(torch.zeros(heads, group, size), np.zeros((heads, 2), np.int32), one, one)


@dataclass
class Parts:
    """Maxima and sums over parts of S sequences with Q queries each.

    Args:
        top: [S, Q] maxima of the logits.
        total: [S, Q] sums of their exponentials, relative to the maxima.
        rotated: [S, Q, D] weighted sums of rotated values.
        plain: [S, Q, D] weighted sums of other values.

    """

    top: torch.Tensor
    total: torch.Tensor
    rotated: torch.Tensor
    plain: torch.Tensor

    @classmethod
    def empty(cls, queries: torch.Tensor) -> "Parts":
        rows = torch.full(queries.shape[:2], LEAST)
        return cls(
            rows, torch.zeros_like(rows), torch.zeros_like(queries), torch.zeros_like(queries)
        )

    def add(
        self, owner: torch.Tensor, logits: torch.Tensor, values: torch.Tensor, rotated: bool
    ) -> None:
        """Add pages.

        Args:
            owner: [P] int64 sequence of each page.
            logits: [P, Q, T] float32, -inf for tokens that a query does not attend to.
            values: [P, T, D] float32, finite.
            rotated: True if the values are rotated.

        """
        top = logits.amax(-1).clamp_(min=LEAST)
        weights = logits.sub_(top[..., None]).exp_()
        total, output = weights.sum(-1), weights @ values
        index = owner[:, None].expand_as(top)
        highest = self.top.scatter_reduce(0, index, top, "amax")
        fading = (self.top - highest).exp_()
        self.total *= fading
        self.rotated *= fading[..., None]
        self.plain *= fading[..., None]
        factor = (top - highest[owner]).exp_()
        self.top = highest
        self.total.index_add_(0, owner, total * factor)
        into = self.rotated if rotated else self.plain
        into.index_add_(0, owner, output * factor[..., None])

    def result(self, rotation: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the attention [S, Q, D].

        Args:
            rotation: The rotation of the values; None for none.
            sinks: [S, Q] logits of attention sinks; None for none.

        """
        total = self.total
        if sinks is not None:
            # A sink far above all logits leaves nothing of the values, and no overflow.
            total = total + (sinks - self.top).clamp_(max=80).exp_()
        rotated = self.rotated if rotation is None else self.rotated @ rotation
        return (rotated + self.plain) / total[..., None]


@dataclass
class StoredBatch:
    """R evicted requests of a step, read from stores in a format of their own and from tails.

    Args:
        heads: The requests as sequences of one KV head each.
        counts: [R] queries of each request.
        tail: [R] tokens of each request in its tail.

    """

    heads: PerHeadBatch
    counts: list[int]
    tail: list[int]

    @classmethod
    def build(
        cls,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "StoredBatch":
        """Lay out some evicted requests of a batch, with the arguments of
        :meth:`PerHeadBatch.build`."""
        counts = common.query_start_loc.diff()[requests]
        tail = common.seq_lens[requests] - state.tail_start[rows]
        heads = PerHeadBatch.build(common, state, rows, requests)
        return cls(heads, counts.tolist(), tail.tolist())

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pages [L, S, V] int32, pages of stores [L, S] int64 and tokens of tails [S] int64, for
        the compiled attention of every layer."""
        tail = torch.tensor(self.tail).repeat_interleave(self.heads.num_heads)
        table, stored = self.heads.table.contiguous(), self.heads.store_pages.contiguous()
        return table.numpy(), stored.numpy(), tail.numpy()

    def attend(
        self, cache: LayerCache, query: torch.Tensor, layer: int, output: torch.Tensor
    ) -> None:
        """Compute the attention of this step's queries in float32.

        Args:
            cache: The layer's cache, this step's tokens included.
            query: [T, query heads, D] of the whole batch.
            layer: Index of the layer in its group.
            output: [T, query heads, D], written in place at the tokens of these requests.

        """
        num_heads, num_tokens = self.heads.num_heads, self.heads.num_tokens
        queries = self.heads.take(query[:num_tokens])
        result = torch.empty_like(queries)
        begin = 0
        for first, last in self._runs():
            count = self.counts[first]
            end = begin + (last - first) * num_heads * count
            mine = queries[begin:end].float().unflatten(0, (-1, count))
            attended = self._run(cache, mine, layer, first, last)
            result[begin:end] = attended.flatten(0, 1).to(result.dtype)
            begin = end
        self.heads.put(output[:num_tokens], result)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of requests with equal numbers of queries."""
        first = 0
        for index, count in enumerate(self.counts):
            if count != self.counts[first]:
                yield first, index
                first = index
        yield first, len(self.counts)

    def _run(
        self, cache: LayerCache, queries: torch.Tensor, layer: int, first: int, last: int
    ) -> torch.Tensor:
        """Return the attention of ``queries`` [S, q, G, D] of some requests, in their shape."""
        heads, stored_format = self.heads, cache.token_format
        count, group, size = queries.shape[1:]
        sequences = slice(first * heads.num_heads, last * heads.num_heads)
        if count == 1 and cache.packed is not None:
            table, stored, tail = self._arrays
            return cache.packed.decode(
                queries[:, 0], table[layer, sequences], stored[layer, sequences], tail[sequences]
            )[:, None]
        rotation = stored_format.rotation(size, queries.device)
        plain = queries.flatten(1, 2)
        turned = plain if rotation is None else plain @ rotation.T
        parts = Parts.empty(plain)
        # What the centres of stored keys add to the logits of all tokens of a store.
        offset = None
        if cache.centres is not None:
            centres = cache.centres.repeat(last - first, 1)
            offset = (plain @ centres[..., None])[..., 0] * cache.scale

        table, in_store = heads.table[layer, sequences], heads.store_pages[layer, sequences, None]
        column = torch.arange(table.shape[1])
        tail = torch.tensor(self.tail[first:last]).repeat_interleave(heads.num_heads)[:, None]
        blocks = -(-tail // cache.layout.block_size)
        in_tail = (column >= in_store) & (column < in_store + blocks)
        sinks = None
        if cache.sinks is not None:
            sinks = cache.sinks.float().repeat(last - first, count)

        owner, place = (column < in_store).nonzero(as_tuple=True)
        for some in self._pieces(owner, cache.page_tokens, plain):
            planes = cache.stored_planes(table[owner[some], place[some]].long())
            keys, values = stored_format.turned(planes)
            mine = owner[some]
            logits = self._logits(
                cache, turned[mine], keys, None if offset is None else offset[mine]
            )
            parts.add(mine, logits, values, rotated=True)

        block_size = cache.layout.block_size
        owner, place = in_tail.nonzero(as_tuple=True)
        query = torch.arange(count).repeat_interleave(group)[:, None]
        for some in self._pieces(owner, block_size, plain):
            mine, pages = owner[some], table[owner[some], place[some]].long()
            token = (place[some] - in_store[mine, 0])[:, None] * block_size
            token = token + torch.arange(block_size)
            logits = self._logits(cache, plain[mine], cache.keys(pages).float())
            seen = token[:, None] < (tail[mine] - count + 1)[..., None] + query
            # Slots after the last token hold values of former requests, which may be NaN.
            values = cache.values(pages).float()
            values = values.masked_fill_((token >= tail[mine])[..., None], 0.0)
            logits.masked_fill_(~seen, float("-inf"))
            parts.add(mine, logits, values, rotated=False)

        return parts.result(rotation, sinks).unflatten(1, (count, group))

    @staticmethod
    def _pieces(owner: torch.Tensor, tokens: int, queries: torch.Tensor) -> Iterator[slice]:
        """Yield ranges of pages whose keys, values and logits take a limited memory."""
        largest = max(
            2 * tokens * queries.shape[2], queries.shape[1] * max(queries.shape[2], tokens)
        )
        step = max(1, ELEMENTS // largest)
        for begin in range(0, len(owner), step):
            yield slice(begin, begin + step)

    @staticmethod
    def _logits(
        cache: LayerCache,
        queries: torch.Tensor,
        keys: torch.Tensor,
        offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [P, Q, T] of queries [P, Q, D] and keys [P, T, D], with an offset
        [P, Q] that is added before they are capped."""
        logits = (queries @ keys.mT).mul_(cache.scale)
        if offset is not None:
            logits += offset[..., None]
        if cache.softcap:
            logits = logits.div_(cache.softcap).tanh_().mul_(cache.softcap)
        return logits
