"""centers: points that leave none of the others far away. Reference."""

import torch

EXACT = "donot_use_mm_for_euclid_dist"
"""How ``cdist`` makes equal points exactly 0 apart."""


def greedy_centers(points: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy k-center (Dyer and Frieze 1985): the next centre is the point farthest from all.

    At most twice as far from the farthest point as the best ``count`` centres are. The first
    centre is the first valid point; ties go to the lower column. Reads all points once for
    every centre. A point at a distance that is not a number counts as near.

    Args:
        points: [H, N, D] float32; what lies where ``valid`` is False does not matter.
        valid: [H, N] bool.
        count: Centres, at most the valid points of every row.

    Returns:
        [H, count] int64 columns, in the order of choice.

    Raises:
        ValueError: A row has fewer valid points than ``count``.

    """
    if count > int(valid.sum(-1).min()):
        raise ValueError(f"a row has fewer than {count} points")
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
