"""Operations that run where their tensors lie: compiled on a CPU, else by PyTorch."""

import torch

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.places import Places
from vllm_kvevict.ops.reference import defensive, select
from vllm_kvevict.ops.reference.probe import Prose, Rotation

COMPILED = True
"""Off in tests of what a GPU runs where no kernel does."""


def compiled(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor are compiled ones."""
    return COMPILED and tensor.is_cpu


def serves(pages: torch.Tensor) -> bool:
    """Whether :func:`read_floats` and :func:`norms` read these pages."""
    return compiled(pages) and pages.dtype in (torch.bfloat16, torch.float32)


def read_floats(pages: torch.Tensor, index: torch.Tensor, places: Places) -> torch.Tensor:
    """Tokens of whole pages on a CPU, as float32.

    Args:
        pages: [num_pages, elements] of bfloat16 or float32.
        index: [H, P] int64 pages.
        places: Of the E elements of a token that are read.

    Returns:
        [H, P * block_size, E] float32, a view of [H, E, P * block_size].

    """
    from vllm_kvevict.ops.cpu import pages as on_cpu

    return on_cpu.read_floats(pages, index, places)


def norms(pages: torch.Tensor, index: torch.Tensor, places: Places) -> torch.Tensor:
    """Euclidean norms of what :func:`read_floats` reads: [H, P * block_size] float32."""
    from vllm_kvevict.ops.cpu import pages as on_cpu

    return on_cpu.norms(pages, index, places)


def copy_tokens(
    pages: torch.Tensor,
    source_page: torch.Tensor,
    source_slot: torch.Tensor,
    target_page: torch.Tensor,
    places: Places,
) -> None:
    """Copy elements of tokens on a CPU, as ``cache/page_layout.py`` copies whole tokens."""
    from vllm_kvevict.ops.cpu import pages as on_cpu

    on_cpu.copy_tokens(pages, source_page, source_slot, target_page, places)


def window_peaks(candidates: Candidates, kernel: int, reach: int) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.defensive.window_peaks`."""
    if compiled(candidates.valid):
        from vllm_kvevict.ops.cpu import peaks

        return peaks.window_peaks(candidates, kernel, reach)
    return defensive.window_peaks(candidates, kernel, reach)


def key_scores(
    pages: torch.Tensor,
    index: torch.Tensor,
    places: Places,
    rotation: Rotation | None,
    weights: torch.Tensor,
    prose: Prose | None = None,
) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.probe.key_scores`, of the tokens of pages on a CPU.

    Args:
        pages: [num_pages, elements] of bfloat16 or float32.
        index: [H, P] int64 pages.
        places: Of the D elements of a key.
        rotation: Of the P * block_size tokens; None for keys that were not rotated.
        weights: [H, C, D + 2] float32; with ``prose`` [H, 2 * C, D + 2].
        prose: Of :func:`vllm_kvevict.ops.reference.probe.with_prose`.

    Returns:
        [H, P * block_size, C] float32.

    """
    from vllm_kvevict.ops.cpu.probe import key_scores as scores

    return scores(pages, index, places, rotation, weights, prose)


def select_tokens(scores: torch.Tensor, pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.select.select_tokens`."""
    if compiled(scores):
        from vllm_kvevict.ops.cpu.select import select_tokens as best

        return best(scores, pages, block_size)
    return select.select_tokens(scores, pages, block_size)
