"""Per-head batches: one sequence per (request, KV head)."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.cpu import page_table
from vllm_kvevict.ops.torch.pages import head_page_table


@dataclass
class PerHeadBatch:
    """R requests of a step, evicted or not, as R * H sequences of G query heads and one KV head.

    Args:
        num_heads: H.
        num_tokens: T, tokens of the whole batch.
        table: [L, R * H, V] int32 head pages.
        seq_lens: [L, R * H] int32 cached tokens.
        query_start_loc: [R * H + 1] int32.
        store_pages: [L, R * H] int64 pages of the store at the left of each row of the table.
        order: [queries] int64 index ``token * H + head`` in the batch of each query of these
            sequences; None if the sequences have all queries of the batch in order.

    """

    num_heads: int
    num_tokens: int
    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    store_pages: torch.Tensor
    order: torch.Tensor | None

    @property
    def num_sequences(self) -> int:
        return self.table.shape[1]

    @classmethod
    def build(
        cls,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "PerHeadBatch":
        """Lay out some requests of a batch.

        Args:
            common: vLLM's metadata of the whole batch.
            state: The group's state.
            rows: [R] int64 state rows of these requests.
            requests: [R] int64 batch indices of these requests.

        """
        heads, splits = state.num_heads, state.splits(rows)
        lay_out = page_table.head_page_table if splits.is_cpu else head_page_table
        table, seq_lens = lay_out(
            splits,
            state.store[rows],
            state.tail_start[rows],
            common.seq_lens[requests],
            common.block_table_tensor[requests],
            state.rule.block_size,
            state.rule.page_tokens,
        )
        starts = common.query_start_loc[:-1][requests].long()
        counts = common.query_start_loc[1:][requests].long() - starts
        per_sequence = counts.repeat_interleave(heads)
        query_start_loc = torch.zeros(len(per_sequence) + 1, dtype=torch.int32)
        query_start_loc[1:] = per_sequence.cumsum(0)

        order = None
        num_queries = int(query_start_loc[-1])
        whole_batch = num_queries == common.num_actual_tokens * heads
        if not whole_batch or num_queries != len(per_sequence):
            head = torch.arange(heads).repeat(len(rows)).repeat_interleave(per_sequence)
            begin = query_start_loc[:-1].long().repeat_interleave(per_sequence)
            token = torch.arange(num_queries) - begin
            token += starts.repeat_interleave(heads).repeat_interleave(per_sequence)
            order = token * heads + head
        store_pages = splits.diff(dim=-1).long().flatten(1)
        return cls(
            heads, common.num_actual_tokens, table, seq_lens, query_start_loc, store_pages, order
        )

    @cached_property
    def by_head(self) -> list["PerHeadBatch"]:
        """The batch divided by KV head, with R sequences each."""
        order = self.order
        if order is None:
            order = torch.arange(self.num_sequences)
        counts = self.query_start_loc.diff()[:: self.num_heads]
        query_start_loc = torch.zeros(len(counts) + 1, dtype=torch.int32)
        query_start_loc[1:] = counts.cumsum(0)
        return [
            replace(
                self,
                table=self.table[:, head :: self.num_heads].contiguous(),
                seq_lens=self.seq_lens[:, head :: self.num_heads].contiguous(),
                store_pages=self.store_pages[:, head :: self.num_heads],
                query_start_loc=query_start_loc,
                order=order[order % self.num_heads == head],
            )
            for head in range(self.num_heads)
        ]

    def slots(
        self, layer: int, sequences: slice, block_size: int, page_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where the cached tokens of some sequences are, in order.

        Args:
            layer: Index of the layer in its group.
            sequences: The S sequences.
            block_size: Tokens in a page of the tail.
            page_tokens: Tokens in a page of a store.

        Returns:
            Pages [S, N] int64 and slots [S, N] int64, 0 after the last token of a sequence, and
            [S, N] bool, True in a store.

        """
        lengths = self.seq_lens[layer, sequences].long()[:, None]
        pages = self.store_pages[layer, sequences, None]
        column = torch.arange(int(lengths.max())).expand(len(lengths), -1)
        new = column - pages * page_tokens
        in_store = new < 0
        place = torch.where(in_store, column // page_tokens, pages + new // block_size)
        slot = torch.where(in_store, column % page_tokens, new % block_size)
        used = column < lengths
        page = self.table[layer, sequences].long().gather(1, place.where(used, 0))
        return page.where(used, 0), slot.where(used, 0), in_store

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """Regroup queries of the batch.

        Args:
            tokens: [T, query heads, D].

        Returns:
            [num queries, G, D] queries, ordered by sequence.

        """
        group = tokens.shape[1] // self.num_heads
        flat = tokens.reshape(-1, group, tokens.shape[2])
        return flat if self.order is None else flat.index_select(0, self.order)

    def put(self, output: torch.Tensor, result: torch.Tensor) -> None:
        """Write the results of the sequences to the output of the batch, in place.

        Args:
            output: [T, query heads, D] contiguous.
            result: [num queries, G, D].

        """
        flat = output.view(-1, *result.shape[1:])
        if self.order is None:
            flat.copy_(result)
        else:
            flat.index_copy_(0, self.order, result)
