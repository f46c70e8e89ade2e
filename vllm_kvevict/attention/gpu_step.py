"""Attention metadata of a step on a GPU, built once for all layers of a group."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.choice import kernel_asked
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.gpu_extensions import Extended, extended_requests
from vllm_kvevict.attention.kernels import OPTIONAL
from vllm_kvevict.attention.sequences import Decode, Extend, Recording


@dataclass
class EvictingMetadata:
    """Metadata of a step of a group that evicts.

    ``stock`` is vLLM's metadata, in which evicted requests have length 0; its results for their
    tokens are overwritten. ``extended`` are requests that extensions of attention run, in addition
    or instead. A decode step has only ``decode``, for all other requests, so that one graph runs
    them whether or not they are evicted. Optional kernels, which do not run in FULL graphs, use
    ``single`` instead for evicted requests with one query token.
    """

    binding: GroupBinding
    buffers: GroupBuffers
    num_actual_tokens: int
    recording: Recording | None = None
    stock: Any = None
    decode: Decode | None = None
    extend: Extend | None = None
    num_splits: int = 0
    single: Extend | None = None
    extended: list[Extended] = field(default_factory=list)


class EvictingBuilderMixin:
    """Lays out a step, once for all layers, without waiting for the device.

    There are five layouts, which differ in the fields that are set in :class:`EvictingMetadata`:

    - *stock*: vLLM's own metadata, for groups that do not evict and outside a scheduled step;
    - *recorded*: ``stock`` and ``recording``, if no request is evicted and queries are recorded;
    - *decode only*: ``decode`` for all requests, evicted or not, with one query token each;
    - *evicted only*: ``decode`` or ``single`` for one query token, ``extend`` for several;
    - *mixed*: the fields of *evicted only*, and ``stock`` for all other requests.

    The worker sets ``binding`` and ``buffers`` for groups that evict; without them the builder is
    vLLM's.
    """

    binding: GroupBinding | None = None
    buffers: GroupBuffers | None = None
    extends: ClassVar[bool] = False
    """True if a policy of the process's server extends attention; the worker sets it."""
    supports_update_block_table = False
    """False, because groups with equal specs keep different tokens, so Model Runner V1 must build
    the metadata of each."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the support for CUDA graphs.

        Decode steps run in FULL graphs. Mixed batches are split on the host, so they run PIECEWISE.
        Optional kernels allocate and compile by batch, and extensions of attention are laid out by
        batch, so all of their steps run PIECEWISE.
        """
        if kernel_asked(vllm_config) in OPTIONAL or EvictingBuilderMixin.extends:
            return AttentionCGSupport.NEVER
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return support if support.value < single.value else single

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        if self.buffers is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        return self.build(0, common_attn_metadata)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        stock = partial(super().build, common_prefix_len, fast_build=fast_build)  # type: ignore[misc]
        if self.binding is None or self.buffers is None:
            return stock(common)
        rows = self.binding.rows(common)
        slots = self.binding.ring_slots(common)
        step = EvictingMetadata(
            self.binding, self.buffers, common.num_actual_tokens, num_splits=self.num_splits(common)
        )
        step.extended = extended_requests(self.binding, self.buffers, common)
        replaced = any(extended.extension.replaces for extended in step.extended)
        fixed = self.buffers.scratch.optional is None and not replaced
        if common.max_query_len == 1 and fixed:
            return self._decode_only(step, common, rows, slots)
        if rows is None:
            return stock(common)
        if slots is not None and bool((slots >= 0).any()):
            window = self.buffers.state.rule.window
            step.recording = self.buffers.recording(common, slots, window)
        evicted = self.buffers.state.evicted[rows]
        if not bool(evicted.any()):
            step.stock = stock(common)
            return step
        plain = evicted & ~self.buffers.state.weighted[rows]
        if bool(plain.any()):
            self._split_evicted(step, common, rows, plain)
        if not bool(evicted.all()):
            step.stock = stock(self._without(common, evicted, self.buffers))
        return step

    def _decode_only(
        self,
        step: EvictingMetadata,
        common: CommonAttentionMetadata,
        rows: torch.Tensor | None,
        slots: torch.Tensor | None,
    ) -> EvictingMetadata:
        """Lay out a decode step for all requests, in buffers that a captured graph reads again."""
        by_slices = step.buffers.scratch.by_slices(common.num_reqs)
        step.decode, recording = step.buffers.decode(common, rows, slots, by_slices)
        step.recording = recording if step.binding.records else None
        return step

    def _split_evicted(
        self,
        step: EvictingMetadata,
        common: CommonAttentionMetadata,
        rows: torch.Tensor,
        evicted: torch.Tensor,
    ) -> None:
        """Lay out evicted requests of a mixed batch, by whether they have one query token."""
        buffers = step.buffers
        counts = common.query_start_loc_cpu.diff()[: len(rows)]
        single = evicted & (counts == 1)
        places = single.nonzero().flatten()
        if len(places) and buffers.scratch.optional is not None:
            step.single = buffers.extend(common, rows[places], places)
        elif len(places):
            step.decode = buffers.some_decode(common, rows[places], places)
        places = (evicted & ~single).nonzero().flatten()
        if len(places):
            step.extend = buffers.extend(common, rows[places], places)

    def _without(
        self, common: CommonAttentionMetadata, evicted: torch.Tensor, buffers: GroupBuffers
    ) -> CommonAttentionMetadata:
        """Return the batch with evicted requests of length 0, for vLLM's own metadata."""
        hidden = buffers.hide(common.seq_lens, evicted)
        if common.max_query_len == 1:
            # vLLM's Triton attention divides by the length of a single query's keys.
            hidden = hidden.clamp(min=1)
        return common.replace(seq_lens=hidden)

    def num_splits(self, common: CommonAttentionMetadata) -> int:
        """Return FlashAttention's maximum splits per sequence; 0 if the kernel decides."""
        return 0
