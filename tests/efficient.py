"""Plain PyTorch in the place of PyTorch's CUTLASS kernel, which has no CPU build."""

from typing import Any

import torch

CAUSAL_FROM_BOTTOM_RIGHT = 2


def efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    compute_log_sumexp: bool,
    custom_mask_type: int,
    scale: float,
    seqlen_k: torch.Tensor,
    window_size: None,
) -> tuple[Any, ...]:
    """``aten::_efficient_attention_forward`` as its kernel_forward.h reads it: tensors alone.

    Args:
        query: [1, queries, G, D].
        key: [1, tokens, G, D].
        value: [1, tokens, G, D].
        bias: None.
        cu_seqlens_q: [N + 1] int32.
        cu_seqlens_k: [N + 1] int32; only starts count where there is ``seqlen_k``.
        max_seqlen_q: Bounds the launch: queries behind it are not computed.
        max_seqlen_k: Not read.
        dropout_p: 0.
        compute_log_sumexp: False.
        custom_mask_type: Causal, aligned to the last query and key.
        scale: Factor on query-key products.
        seqlen_k: [N] int32.
        window_size: None.

    """
    assert custom_mask_type == CAUSAL_FROM_BOTTOM_RIGHT and not compute_log_sumexp
    assert bias is None and window_size is None and dropout_p == 0.0
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(seqlen_k) + 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == seqlen_k.dtype == torch.int32
    assert key.stride(3) == value.stride(3) == query.stride(3) == 1
    if key.shape[2] > 1:
        assert key.stride(2) == value.stride(2) == 0, "the kernel would read each key G times"
    out = torch.full_like(query, float("nan"))
    for index, length in enumerate(seqlen_k.tolist()):
        begin, end = cu_seqlens_q[index : index + 2].tolist()
        end = min(end, begin + max_seqlen_q)
        start = int(cu_seqlens_k[index])
        keys, values = (x[0, start : start + length].double() for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[0, begin:end].double(), keys) * scale
        last = torch.arange(end - begin)[:, None] + length - (end - begin)
        logits = logits.masked_fill(torch.arange(length) > last, float("-inf"))
        out[0, begin:end] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).to(out.dtype)
    return (out, None, None, None, None, None)
