"""The model whose heads are masked is that of the benchmarks."""

from benchmarks.oracles.masked import (
    Kept,
    Life,
    MaskedModel,
    check_tokens,
    cut_to_fp8,
    two_biases,
    two_biases_fp8,
)

__all__ = [
    "Kept",
    "Life",
    "MaskedModel",
    "check_tokens",
    "cut_to_fp8",
    "two_biases",
    "two_biases_fp8",
]
