"""Greedy k-center selection: its reference, and an operation that takes one launch on a GPU."""

import torch

EXACT = "donot_use_mm_for_euclid_dist"
"""Mode of ``cdist`` in which the distance of equal points is exactly 0."""


def greedy_centers(points: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    """Choose centres by greedy k-center (Dyer and Frieze 1985).

    The next centre is the point with the largest distance to all centres so far. The largest
    distance of any point to its centre is at most twice that of the best ``count`` centres. The
    first centre is the first valid point; ties go to the lower column. All points are read once for
    every centre. NaN distances count as 0.

    Args:
        points: [H, N, D] of any float type, compared in float32; ignored if ``valid`` is False.
        valid: [H, N] bool.
        count: Number of centres, at most the valid points of every row.

    Returns:
        [H, count] int64 columns, in the order of choice.

    Raises:
        ValueError: A row has fewer valid points than ``count``. This is checked on a CPU only.

    """
    # On a GPU the host does not look, because it would wait. A head keeps no more than it has.
    if valid.is_cpu and count > int(valid.sum(-1).min()):
        raise ValueError(f"a row has fewer than {count} points")
    points = points.float()
    rows = torch.arange(len(points), device=points.device)
    # Infinite until the first centre is chosen; -inf is never chosen.
    away = torch.where(valid, float("inf"), float("-inf"))
    centers = torch.empty(len(points), count, dtype=torch.int64, device=points.device)
    for number in range(count):
        center = away.argmax(-1)
        centers[:, number] = center
        distance = torch.cdist(points, points[rows, center][:, None], compute_mode=EXACT)[..., 0]
        away = torch.minimum(away, distance.nan_to_num(nan=0.0, posinf=float("inf")))
        away.scatter_(1, center[:, None], float("-inf"))
    return centers


def _on_a_gpu(points: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    # Servers on CPUs do not load Triton.
    from vllm_kvevict.ops.triton import centers

    return centers.greedy_centers(points, valid, count)


def _shape(points: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    return valid.new_empty(len(points), count, dtype=torch.int64)


_LIBRARY = torch.library.Library("vllm_kvevict_ops", "DEF")
_LIBRARY.define("greedy_centers(Tensor points, Tensor valid, int count) -> Tensor")
_LIBRARY.impl("greedy_centers", greedy_centers, "CPU")
_LIBRARY.impl("greedy_centers", _on_a_gpu, "CUDA")
torch.library.register_fake("vllm_kvevict_ops::greedy_centers", _shape, lib=_LIBRARY)

choose_centers = torch.ops.vllm_kvevict_ops.greedy_centers
""":func:`greedy_centers` by its device: PyTorch operations on a CPU, one Triton kernel on a GPU."""
