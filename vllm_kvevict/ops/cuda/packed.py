"""The format of stores as the CUDA operations take it."""

from functools import cache

import torch

from vllm_kvevict.ops.token_format import PackedFormat, TokenFormat, signs

Format = tuple[int, int, list[int], torch.Tensor]
"""Bits of keys and values, a bit for each dimension that the rotation multiplies by -1, and the
centres of the keys."""


def format_arguments(
    token_format: TokenFormat, head_size: int, centres: torch.Tensor | None, device: torch.device
) -> Format:
    """Return the arguments of an operation that reads or writes stores: zeros for as cached.

    Args:
        token_format: Format of stored tokens.
        head_size: D.
        centres: [L, H, D] float32, without which keys are stored. Not read for as cached.
        device: Device of the operation.

    Raises:
        ValueError: No kernel reads this format, or it has no centres.

    """
    if token_format.as_cached:
        return 0, 0, [], torch.empty(0, device=device)
    if not isinstance(token_format, PackedFormat):
        raise ValueError(f"the CUDA kernels do not read stores of {token_format.name}")
    if centres is None:
        raise ValueError("stores in few bits need the centres of their keys")
    return token_format.key_bits, token_format.value_bits, _sign_words(head_size), centres


@cache
def _sign_words(head_size: int) -> list[int]:
    negative = (signs(head_size) < 0).tolist()
    words = [0] * -(-head_size // 32)
    for dimension, bit in enumerate(negative):
        words[dimension // 32] |= bit << dimension % 32
    return words
