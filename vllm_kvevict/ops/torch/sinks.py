"""sinks: attention weights beside a learned sink, which takes some of each row. Reference."""

import torch


def attention_weights(logits: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over the last dimension, with a sink in the denominator.

    A sink is a learned logit that no value answers to (gpt-oss, arXiv:2508.10925, section 2.2;
    StreamingLLM, arXiv:2309.17453, section 3.3): ``exp(l) / (exp(sink) + sum exp(l))``.

    Args:
        logits: [..., n] float32; -inf for unseen tokens.
        sinks: A float32 sink for every row, of shape [...] or one that broadcasts to it; None
            for none.

    Returns:
        [..., n] float32; a row sums to 1 without a sink, to less with one.

    """
    if sinks is None:
        return logits.softmax(-1)
    whole = torch.logaddexp(logits.logsumexp(-1), sinks)
    return (logits - whole[..., None]).exp()
