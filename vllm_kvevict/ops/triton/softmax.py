"""Logits of the online softmax. Triton."""

import triton
import triton.language as tl


@triton.jit
def base_2(logits, used, softcap, SOFTCAP: tl.constexpr, LOG2E: tl.constexpr):
    """Return capped logits in base 2, -inf where they are not used.

    Args:
        logits: [GROUP_PAD, TILE] float32, in base 2 if there is no cap.
        used: [TILE] bool.
        softcap: The cap.
        SOFTCAP: True if there is one.
        LOG2E: Logarithm of e in base 2.

    """
    if SOFTCAP:
        # tanh by the sigmoid, because Triton has no tanh.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * LOG2E
    return tl.where(used[None, :], logits, float("-inf"))
