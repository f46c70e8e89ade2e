"""Positions of a long prompt, put together so that a picture can show them."""

import numpy as np
from numpy.typing import NDArray


def bin_edges(start: int, stop: int, limit: int) -> NDArray[np.int64]:
    """Edges of at most ``limit`` equal bins over [start, stop); the last may be narrower."""
    width = max(1, -(-(stop - start) // limit))
    return np.append(np.arange(start, stop, width, dtype=np.int64), stop)


def bin_means(values: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """[..., bins]: mean of [..., n] values between edges; ``edges[-1]`` is n."""
    sums = np.add.reduceat(values, edges[:-1], axis=-1)
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def bin_maxima(values: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """[..., bins]: largest of [..., n] values between edges."""
    return np.asarray(np.maximum.reduceat(values, edges[:-1], axis=-1), dtype=np.float64)
