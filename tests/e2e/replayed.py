"""Decode steps of an engine as a GPU runs them: padded to a graph's size, captured once, replayed.

A builder lays every decode step out in buffers that stay where they are; attention of a layer is
captured as a list of calls (``tests/interpreted/capture.py``) the first time that a size occurs,
with metadata made for the capture, and replayed from then on: a replay runs no Python of ours.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.interpreted.capture import Graph
from vllm_kvevict.attention.gpu_step import EvictingMetadata

SIZES = (2, 4)
"""Requests that graphs are captured for."""

UNUSED_BLOCK = 2**30
"""In the block tables of requests that a graph has and a step has not."""


class Steps:
    """``build`` of a builder. What vLLM keeps at fixed addresses for its graphs is kept here.

    Args:
        builder: Of attention metadata.
        max_model_len: In tokens.

    """

    def __init__(self, builder: Any, max_model_len: int) -> None:
        self._build = builder.build
        self._capture = builder.build_for_cudagraph_capture
        self._longest = max_model_len
        self._seq_lens = torch.ones(max(SIZES), dtype=torch.int32)
        self._table: torch.Tensor | None = None
        self._capturing = False
        self.captured: dict[int, EvictingMetadata] = {}
        self.replays = self.padded = 0

    def __call__(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        if common.max_query_len > 1 or self._capturing:
            return self._build(prefix, common, fast_build)
        requests, table = common.num_reqs, common.block_table_tensor
        size = next(size for size in SIZES if size >= requests)
        if self._table is None:
            self._table = torch.zeros(max(SIZES), table.shape[1], dtype=torch.int32)
        if size in self.captured:
            self.replays += 1
        else:
            self._capturing = True
            self.captured[size] = self._capture(self._at_fixed_addresses(common, size))
            self._capturing = False
        self.padded += size - requests
        self._seq_lens.zero_()[:requests] = common.seq_lens[:requests]
        self._table.fill_(UNUSED_BLOCK)[:requests] = table[:requests]
        self._build(prefix, self._at_fixed_addresses(common, size), fast_build)
        return self.captured[size]

    def _at_fixed_addresses(self, common: Any, size: int) -> Any:
        assert self._table is not None
        starts = torch.arange(size + 1, dtype=torch.int32)
        return common.replace(
            num_reqs=size,
            num_actual_tokens=size,
            max_seq_len=self._longest,
            seq_lens=self._seq_lens[:size],
            block_table_tensor=self._table[:size],
            query_start_loc=starts,
            query_start_loc_cpu=starts,
        )


class Layer:
    """``forward`` of a layer's attention; steps that :class:`Steps` has captured are replayed."""

    def __init__(self, impl: Any, steps: Sequence[Steps]) -> None:
        self._forward = impl.forward
        self._steps = steps
        self._graphs: dict[int, tuple[Graph, torch.Tensor, torch.Tensor]] = {}
        self.launches: set[tuple[str, ...]] = set()

    def __call__(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        if not any(metadata is one for steps in self._steps for one in steps.captured.values()):
            return self._forward(layer, query, key, value, cache, metadata, output, **scales)
        size, tokens = metadata.num_actual_tokens, len(query)
        if size not in self._graphs:
            self._graphs[size] = self._captured(layer, query, cache, metadata, output)
        graph, queries, outputs = self._graphs[size]
        queries[:tokens] = query
        graph.replay()
        output[:tokens] = outputs[:tokens]
        return output

    def _captured(
        self, layer: Any, query: torch.Tensor, cache: Any, metadata: Any, output: torch.Tensor
    ) -> tuple[Graph, torch.Tensor, torch.Tensor]:
        size, graph = metadata.num_actual_tokens, Graph()
        queries = torch.zeros(size, *query.shape[1:], dtype=query.dtype)
        outputs = torch.zeros(size, *output.shape[1:], dtype=output.dtype)
        with pytest.MonkeyPatch.context() as patch, graph.capturing(patch):
            self._forward(layer, queries, None, None, cache, metadata, outputs)
        self.launches.add(tuple(graph.launches))
        return graph, queries, outputs
