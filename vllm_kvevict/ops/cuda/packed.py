"""The format of stores as the CUDA operations take it."""

from functools import cache

from vllm_kvevict.ops.token_format import PackedFormat, TokenFormat, signs

Format = tuple[int, int, list[int]]
"""Bits of keys and values, and a bit for each dimension that the rotation multiplies by -1."""


def format_arguments(token_format: TokenFormat, head_size: int) -> Format:
    """Return the arguments of an operation that reads or writes stores: zeros for as cached.

    Args:
        token_format: Format of stored tokens.
        head_size: D.

    Raises:
        ValueError: No kernel reads this format.

    """
    if token_format.as_cached:
        return 0, 0, []
    if not isinstance(token_format, PackedFormat):
        raise ValueError(f"the CUDA kernels do not read stores of {token_format.name}")
    return token_format.key_bits, token_format.value_bits, _sign_words(head_size)


@cache
def _sign_words(head_size: int) -> list[int]:
    negative = (signs(head_size) < 0).tolist()
    words = [0] * -(-head_size // 32)
    for dimension, bit in enumerate(negative):
        words[dimension // 32] |= bit << dimension % 32
    return words
