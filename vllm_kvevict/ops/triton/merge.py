"""Merging of the pieces of a sequence by the program that ends its last piece. Triton."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MERGED = 4096
"""Number of partial sums that a merge holds at once: 32 registers per thread."""


@dataclass(frozen=True)
class Partials:
    """Buffers through which P programs communicate, shared by all layers, which run in sequence.

    Args:
        sums: [2 * P, G, D] float32 weighted sums of the values of each piece.
        weights: [2 * P, G, 2] float32 highest logit to base 2, and sum of the weights.
        arrived: [P] int32 number of pieces that have ended, of the sequence whose first piece the
            program has; 0 between launches.

    """

    sums: torch.Tensor
    weights: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def room(cls, programs: int, group: int, head_size: int, device: torch.device) -> "Partials":
        """Allocate buffers for so many programs."""
        return cls(
            sums=torch.zeros(2 * programs, group, head_size, device=device),
            weights=torch.zeros(2 * programs, group, 2, device=device),
            arrived=torch.zeros(programs, dtype=torch.int32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in vars(self).values())


@triton.jit
def place_of(owner, piece):
    """Return the place of a partial result: each program has one for a sequence that goes on from
    the program before, and one for a sequence that goes on in the next program."""
    return tl.where(piece == 0, 2 * owner + 1, 2 * (owner + piece))


@triton.jit
def merge_pieces(
    partial,
    weights,
    sinks,
    out,
    out_at,
    owner,
    pieces,
    head,
    value_scale,
    out_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Merge all pieces of one sequence, ``AT_ONCE`` at a time, in order."""
    group = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    in_group = group < GROUP
    own_head = head * GROUP + group
    best = tl.full([ROWS], -1e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if SINKS:
        best = tl.load(sinks + own_head, mask=in_group, other=0.0) * LOG2E
        weight = tl.full([ROWS], 1.0, tl.float32)
    sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for base in tl.range(0, pieces, AT_ONCE, num_stages=1):
        piece = base + tl.arange(0, AT_ONCE)
        used = (piece < pieces)[:, None] & in_group[None, :]
        at = place_of(owner, piece).to(tl.int64)[:, None] * GROUP + group[None, :]
        # Not from the L1 cache, which may hold stale data.
        own_best = tl.load(weights + at * 2, mask=used, other=-1e30, cache_modifier=".cg")
        own_weight = tl.load(weights + at * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
        own = tl.load(
            partial + at[:, :, None] * DIM + dim[None, None, :],
            mask=used[:, :, None] & (dim < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(own_best, 0))
        decay = tl.exp2(best - new_best)
        scale = tl.exp2(own_best - new_best[None, :])
        weight = weight * decay + tl.sum(own_weight * scale, 0)
        sums = sums * decay[:, None] + tl.sum(own * scale[:, :, None], 0)
        best = new_best
    result = sums * (value_scale / weight)[:, None]
    mask = in_group[:, None] & (dim < DIM)[None, :]
    at_out = out_at + own_head[:, None] * out_head + dim[None, :]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=mask)
