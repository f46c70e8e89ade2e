"""Attention weights with learned attention sinks. Reference."""

import torch


def attention_weights(
    logits: torch.Tensor, sinks: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the softmax over the last dimension, with a sink in the denominator.

    A sink is a learned logit without a value (gpt-oss, arXiv:2508.10925, section 2.2;
    StreamingLLM, arXiv:2309.17453, section 3.3): ``exp(l) / (exp(sink) + sum exp(l))``.

    Args:
        logits: [..., n] float32; -inf for masked tokens.
        sinks: [...] float32 sink of every row, or a shape that broadcasts to it; None for none.
        out: [..., n] float32 to write to; None for a new tensor.

    Returns:
        [..., n] float32; a row sums to 1 without a sink, to less with a sink.

    """
    if sinks is None:
        return torch.softmax(logits, -1, out=out)
    lse = torch.logaddexp(logits.logsumexp(-1), sinks)
    return torch.sub(logits, lse[..., None], out=out).exp_()
