"""Sum of the attention that the queries of a step give each cached token. Reference."""

import torch

LOGITS = 2**22
"""Maximum number of logits in memory at once: 16 MiB of float32."""


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the softmax weight of every token, summed over the queries.

    NACL (arXiv:2408.03675) Algorithm 2: the column sums of ``exp(q K^T * scale - L)``, with L the
    log-sum-exp of a query's row. Blocks of queries are processed in turn, so the attention matrix
    is never in memory as a whole. vLLM's CPU kernel does not return L, so it is computed here. The
    weights are averaged over the query heads of a group, as kvpress's ObservedAttentionPress does:
    H2O has one query head per KV head, and with a mean the weights of each query still sum to 1.

    Args:
        queries: [B, G, q, D] queries of the last q tokens of each sequence.
        keys: [B, N, D] keys of cached tokens, left-aligned. Keys after a length are ignored.
        lengths: [B] int cached tokens, the last q included. Query i attends to the first
            ``length - q + i + 1``.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        sinks: [B, G] float32 attention sinks, None for none.

    Returns:
        [B, N] float32; 0 after a length. The sums of a sequence add up to q, or to less with sinks.

    """
    group, count = queries.shape[1], queries.shape[2]
    columns = keys.shape[1]
    keys = keys.float().transpose(1, 2)
    column = torch.arange(columns, device=keys.device)
    sums = torch.zeros(len(keys), columns, dtype=torch.float32, device=keys.device)
    rows = max(1, LOGITS // max(1, len(keys) * group * columns))
    for start in range(0, count, rows):
        block = queries[:, :, start : start + rows].float()
        here = block.shape[2]
        logits = (block.flatten(1, 2) @ keys).unflatten(1, (group, here)).mul_(scale)
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        last = lengths[:, None] - count + start + torch.arange(here, device=keys.device)
        logits.masked_fill_((column > last[..., None])[:, None], float("-inf"))
        lse = logits.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks[..., None, None])
        weights = logits.sub_(lse).exp_()
        sums += weights.sum((1, 2))
    return sums / group
