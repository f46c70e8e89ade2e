"""Buffers of a step on a GPU: its requests as (request, KV head) sequences.

The host knows which requests are evicted, but not the length of each head. Kernels therefore
compute lengths, slices and page tables on the device. A decode step writes them to buffers that a
captured graph reads again, because a replay runs no Python.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.scratch import BEFORE_SEQUENCE, MIN_SLICE, Scratch
from vllm_kvevict.attention.sequences import Decode, Extend, Recording
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.triton.decode import Ring
from vllm_kvevict.ops.triton.page_table import write_page_table
from vllm_kvevict.ops.triton.slices import Slices, head_lengths, plan_slices
from vllm_kvevict.rules.rule import blocks_for

LINE = 16
"""Alignment of addresses and strides, in elements. vLLM's Triton attention is compiled again for
addresses and strides that are not multiples of it."""


class GroupBuffers:
    """Buffers of one KV-cache group that decode steps rewrite in place.

    Args:
        state: The group's eviction state.
        scratch: The worker's scratch buffers.
        device: Device of attention.

    """

    def __init__(self, state: GroupState, scratch: Scratch, device: torch.device) -> None:
        self.state = state
        self.scratch = scratch
        self.device = device
        requests, layers = scratch.shape.max_requests, len(state.layer_names)
        sequences = requests * state.num_heads

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows_and_slots = numbers(2, requests)
        self._ones = numbers(requests)
        self._count = numbers(sequences + 1)
        self.lengths = numbers(layers, sequences)
        self.slices = Slices.room(
            layers, sequences if scratch.programs else 0, scratch.programs, device
        )
        self.reset()
        if scratch.optional is not None:
            scratch.optional.load()

    def reset(self) -> None:
        """Write the numbers that no step rewrites, whatever the memory holds."""
        self._rows_and_slots.fill_(-1)
        self._ones.fill_(1)
        torch.arange(len(self._count), out=self._count)

    @property
    def num_bytes(self) -> int:
        buffers = (self.lengths, self._count)
        own = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        return own + self.slices.num_bytes

    def decode(
        self,
        common: CommonAttentionMetadata,
        rows: torch.Tensor | None,
        slots: torch.Tensor | None,
        by_slices: bool,
    ) -> tuple[Decode, Recording]:
        """Lay out a step in which every request has one query token.

        Args:
            common: vLLM's metadata, which may be padded to the requests of a graph.
            rows: [<= R] int64 state rows on the host; None outside a scheduled step.
            slots: [<= R] int64 ring slots on the host, -1 for none; None if all have none.
            by_slices: True for the Triton decode kernel, False for FlashAttention.

        Returns:
            Views of the buffers, which are the same for the same number of requests.

        """
        requests = common.num_reqs
        staged = torch.full((2, requests), -1, dtype=torch.int32)
        for line, values in enumerate((rows, slots)):
            if values is not None:
                staged[line, : len(values)] = values
        numbers = self._rows_and_slots[:, :requests]
        numbers.copy_(async_tensor_h2d(staged, device=self.device), non_blocking=True)
        places = self._count[:requests]
        decode = Decode(
            rows=numbers[0],
            places=places,
            tokens=places,
            in_order=True,
            block_table=common.block_table_tensor,
            lengths=self.lengths,
            query_start_loc=self._count[: requests * self.state.num_heads + 1],
            max_seq_len=common.max_seq_len,
            slices=self.slices if by_slices else None,
            stages=self.scratch.stages(requests * self.state.num_heads),
        )
        self.measure(decode, common.seq_lens)
        recording = Recording(places, places, self._ones[:requests], numbers[1], common.seq_lens)
        return decode, recording

    def some_decode(
        self, common: CommonAttentionMetadata, rows: torch.Tensor, places: torch.Tensor
    ) -> Decode:
        """Lay out requests of a mixed batch with one query token each.

        Args:
            common: vLLM's metadata.
            rows: [R] int64 state rows, on the host.
            places: [R] int64 batch indices, on the host.

        """
        tokens = common.query_start_loc_cpu[places]
        on_device = self._upload(rows, places, tokens)
        sequences = len(rows) * self.state.num_heads
        decode = Decode(
            rows=on_device[0],
            places=on_device[1],
            tokens=on_device[2],
            in_order=False,
            block_table=common.block_table_tensor,
            lengths=self.lengths,
            query_start_loc=self._count[: sequences + 1],
            max_seq_len=common.max_seq_len,
            slices=self.slices,
            stages=self.scratch.stages(sequences),
        )
        self.measure(decode, common.seq_lens)
        return decode

    def extend(
        self, common: CommonAttentionMetadata, rows: torch.Tensor, places: torch.Tensor
    ) -> Extend:
        """Lay out requests of a batch with any number of query tokens, evicted or not.

        Args:
            common: vLLM's metadata.
            rows: [R] int64 state rows, on the host.
            places: [R] int64 batch indices, on the host.

        """
        heads, layers = self.state.num_heads, len(self.state.layer_names)
        starts = common.query_start_loc_cpu[places].long()
        counts = common.query_start_loc_cpu[places + 1].long() - starts
        per_sequence = counts.repeat_interleave(heads)
        ends = per_sequence.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - per_sequence).repeat_interleave(per_sequence)
        token = within + starts.repeat_interleave(heads).repeat_interleave(per_sequence)
        head = torch.arange(heads).repeat(len(rows)).repeat_interleave(per_sequence)
        query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        # query_start_loc is uploaded first, and rows of lengths are padded, to align addresses.
        starts_on_device, *on_device = self._upload(query_start_loc, rows, places)
        sequences = len(rows) * heads
        padded = blocks_for(sequences, LINE) * LINE
        lengths = torch.empty(layers, padded, dtype=torch.int32, device=self.device)
        lengths = lengths[:, :sequences]
        head_lengths(
            on_device[0],
            on_device[1],
            common.seq_lens,
            self.state.tail_start,
            self.state.head_indptr,
            lengths,
            self.state.rule.page_tokens,
        )
        parts: Sequence[Any] = ()
        longest = self._longest(common, rows, places)
        starts_on_host = query_start_loc.tolist()
        if self.scratch.optional is not None:
            table = self.scratch.pages(sequences, longest)
            parts = self.scratch.optional.plan(starts_on_host, starts_on_device, table.shape[1])
        else:
            pages = -(-common.max_seq_len // self.state.rule.block_size)
            table = self.scratch.table[:sequences, :pages]
        return Extend(
            rows=on_device[0],
            places=on_device[1],
            order=async_tensor_h2d(token * heads + head, device=self.device),
            block_table=common.block_table_tensor,
            lengths=lengths,
            query_start_loc=starts_on_device,
            table=table,
            max_query_len=int(counts.max()),
            max_seq_len=common.max_seq_len,
            parts=parts,
            starts=starts_on_host,
            longest=longest,
        )

    def _longest(
        self, common: CommonAttentionMetadata, rows: torch.Tensor, places: torch.Tensor
    ) -> int:
        """Return an upper bound of the cached tokens of each head, computed on the host."""
        shorter = self.state.shorter[rows] * self.state.evicted[rows]
        bounds = common.seq_lens_cpu_upper_bound
        if bounds is None:
            return common.max_seq_len - int(shorter.min())
        return int((bounds[places].long() - shorter).max())

    def write_table(
        self,
        step: Decode | Extend,
        layer: int,
        table: torch.Tensor,
        query: torch.Tensor | None = None,
        ring: Ring | None = None,
    ) -> None:
        """Write the pages of a step's sequences in one layer, and record its queries.

        Args:
            step: The requests.
            layer: Index of the layer in its group.
            table: [>= R * H, V] int32.
            query: [>= R, query heads, D] single queries, read only if there is a ring.
            ring: Ring entries to which the queries are written; None for none.

        """
        state = self.state
        write_page_table(
            step.rows,
            step.places,
            state.tail_start,
            state.stores,
            state.head_indptr[layer],
            step.block_table,
            step.lengths[layer],
            table,
            state.rule.block_size,
            state.rule.page_tokens,
            query,
            ring,
        )

    def measure(self, decode: Decode, seq_lens: torch.Tensor) -> None:
        """Compute the slices of all layers for the Triton decode kernel, else their lengths."""
        state = self.state
        if decode.slices is None:
            head_lengths(
                decode.rows,
                decode.places,
                seq_lens,
                state.tail_start,
                state.head_indptr,
                self.lengths,
                state.rule.page_tokens,
            )
            return
        plan_slices(
            decode.rows,
            decode.places,
            decode.tokens,
            seq_lens,
            state.tail_start,
            state.head_indptr,
            decode.slices,
            state.rule.block_size,
            state.rule.page_tokens,
            MIN_SLICE,
            BEFORE_SEQUENCE,
        )

    def hide(self, seq_lens: torch.Tensor, evicted: torch.Tensor) -> torch.Tensor:
        """Return ``seq_lens`` [R] with 0 for requests that ``evicted`` [R], on the host, marks."""
        return seq_lens * async_tensor_h2d((~evicted).to(torch.int32), device=self.device)

    def recording(
        self, common: CommonAttentionMetadata, slots: torch.Tensor, window: int
    ) -> Recording:
        """Return the tokens to record: up to ``window`` last tokens of requests with a ring slot.

        Args:
            common: vLLM's metadata.
            slots: [R] int64 ring slots on the host, -1 for none.
            window: Queries in a slot.

        """
        holders = (slots >= 0).nonzero().flatten()
        ends = common.query_start_loc_cpu[1:][holders].long()
        counts = (ends - common.query_start_loc_cpu[:-1][holders].long()).clamp(max=window)
        last = counts.cumsum(0).repeat_interleave(counts)
        back = last - torch.arange(int(counts.sum()))
        tokens = ends.repeat_interleave(counts) - back
        places = holders.repeat_interleave(counts)
        on_device = self._upload(tokens, places, back, slots[places])
        return Recording(
            tokens=on_device[0],
            places=on_device[1],
            back=on_device[2],
            slots=on_device[3],
            seq_lens=common.seq_lens,
        )

    def _upload(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy tensors to the device as int32, in one transfer."""
        joined = torch.cat([part.to(torch.int32) for part in parts])
        moved = async_tensor_h2d(joined, device=self.device)
        return moved.split([len(part) for part in parts])
