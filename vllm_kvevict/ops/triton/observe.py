"""Observation: write queries to the observation rings, at fixed addresses. Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(
    do_not_specialize_on_alignment=["seq_lens", "tokens", "places", "back", "slots"],
)
def _observe_kernel(
    rings,
    query,
    seq_lens,
    tokens,
    places,
    back,
    slots,
    window,
    query_token,
    query_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slots + index)
    if slot >= 0:
        token = tl.load(tokens + index).to(tl.int64)
        place = tl.load(places + index)
        position = tl.load(seq_lens + place) - tl.load(back + index)
        entry = slot.to(tl.int64) * window + position % window
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < HEADS * DIM
        at = token * query_token + element // DIM * query_head + element % DIM
        value = tl.load(query + at, mask=mask, other=0.0)
        value = value.to(rings.dtype.element_ty)
        tl.store(rings + entry * (HEADS * DIM) + element, value, mask=mask)


def observe_tokens(
    rings: torch.Tensor,
    query: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
    back: torch.Tensor,
    slots: torch.Tensor,
    window: int,
) -> None:
    """Copy queries to entry ``slot * window + position % window`` of the rings of one layer.

    Args:
        rings: [ring slots * window, query heads, D] contiguous, written.
        query: [T, query heads, D], dimensions contiguous, rotated as in attention; FP8 is widened
            to the rings' type, without its scale.
        seq_lens: [batch] int32 lengths, this step's tokens included.
        tokens: [K] int32 token indices in ``query``.
        places: [K] int32 batch index of each token's request.
        back: [K] int32 number of tokens from this one to the end of its request, inclusive.
        slots: [K] int32 ring slot, -1 for tokens that are not recorded.
        window: Queries in a slot.

    """
    heads, dim = query.shape[1:]
    _observe_kernel[(slots.shape[0], triton.cdiv(heads * dim, _BLOCK))](
        rings,
        query,
        seq_lens,
        tokens,
        places,
        back,
        slots,
        window,
        query.stride(0),
        query.stride(1),
        HEADS=heads,
        DIM=dim,
        BLOCK=_BLOCK,
    )
