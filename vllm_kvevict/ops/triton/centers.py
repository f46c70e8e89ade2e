"""Greedy k-center in one launch. Triton.

A program chooses all centres of a head, one after another. It reads all keys of the head for
each centre, so the bandwidth of the memory bounds it.
"""

import torch
import triton
import triton.language as tl

_TILE = 2**15
"""Elements of the keys that a program reads at once: 64 KiB in 16 bits, which hides the latency of
memory if there is one program on a multiprocessor."""

_WARPS = 16


# One variant for each dtype and head size, so that nothing compiles while serving.
@triton.jit(do_not_specialize=["columns", "count", "head_tokens"])
def _centers_kernel(
    keys,
    away,
    centers,
    columns,
    count,
    head_tokens,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    keys += head * head_tokens * DIM
    away += head * columns
    centers += head * count
    lane, dim = tl.arange(0, BLOCK), tl.arange(0, DIM_PAD)
    # The farthest of the columns that a lane has seen, the lowest of equal ones.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    farthest = lane
    for start in range(0, columns, BLOCK):
        column = start + lane
        distance = tl.load(away + column, mask=column < columns, other=float("-inf"))
        farthest = tl.where(distance > best, column, farthest)
        best = tl.maximum(best, distance)
    for number in range(count):
        center = tl.min(tl.where(best == tl.max(best, 0), farthest, 2**31 - 1), 0)
        tl.store(centers + number, center.to(tl.int64))
        middle = tl.load(keys + center * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        farthest = lane
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            distance = tl.load(away + column, mask=inside, other=float("-inf"))
            mask = inside[:, None] & (dim < DIM)[None, :]
            element = column[:, None] * DIM + dim[None, :]
            points = tl.load(keys + element, mask=mask, other=0.0).to(tl.float32)
            apart = points - middle[None, :]
            new = tl.sqrt_rn(tl.sum(apart * apart, 1))
            new = tl.where(new == new, new, 0.0)
            distance = tl.where(column == center, float("-inf"), tl.minimum(distance, new))
            tl.store(away + column, distance, mask=inside)
            farthest = tl.where(distance > best, column, farthest)
            best = tl.maximum(best, distance)
        # A thread reads distances that others wrote.
        tl.debug_barrier()


def greedy_centers(points: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    """Choose centres as :func:`vllm_kvevict.ops.torch.centers.greedy_centers` does, in one launch.

    Distances are computed in float32. They differ from those of PyTorch in the order of the sum.

    Args:
        points: [H, N, D] of any float type; ignored if ``valid`` is False. They are copied unless
            the last two dimensions are contiguous.
        valid: [H, N] bool.
        count: Number of centres, at most the valid points of every row, which is not checked.

    Returns:
        [H, count] int64 columns, in the order of choice.

    """
    heads, columns, dim = points.shape
    centers = torch.empty(heads, count, dtype=torch.int64, device=points.device)
    if not centers.numel():
        return centers
    if points.stride()[1:] != (dim, 1) or points.stride(0) % dim:
        points = points.contiguous()
    away = torch.where(valid, float("inf"), float("-inf"))
    pad = max(16, triton.next_power_of_2(dim))
    _centers_kernel[(heads,)](
        points,
        away,
        centers,
        columns,
        count,
        points.stride(0) // dim,
        DIM=dim,
        DIM_PAD=pad,
        BLOCK=max(16, _TILE // pad),
        num_warps=_WARPS,
    )
    return centers
