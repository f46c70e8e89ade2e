"""Plain PyTorch in the place of FlashAttention's kernel and of vLLM's cache writers."""

from typing import Any

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    softcap: float = 0.0,
    window_size: Any = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    **ignored: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Causal paged attention, the mask aligned to the end; rows without a key become 0.

    Scales of FP8 are [sequences, KV heads], sinks [query heads], as FlashAttention 3 takes them.
    The log-sum-exp is [query heads, queries].
    """
    assert causal and q.shape[0] == out.shape[0] == int(cu_seqlens_q[-1])
    assert window_size in (None, [-1, -1])
    starts = cu_seqlens_q.tolist()
    lse = torch.zeros(q.shape[1], len(q), dtype=torch.float32)
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for index, length in enumerate(seqused_k.tolist()):
        first, last = starts[index], starts[index + 1]
        assert last - first <= max_seqlen_q and length <= max_seqlen_k
        pages = block_table[index, : -(-length // page)].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
        if k_descale is not None and v_descale is not None:
            keys, values = keys * k_descale[index, :, None], values * v_descale[index, :, None]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        queries = q[first:last].double()
        if q_descale is not None:
            queries = queries * q_descale[index].repeat_interleave(group)[:, None]
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        position = torch.arange(last - first)[:, None] + length - (last - first)
        logits = logits.masked_fill(torch.arange(length) > position, float("-inf"))
        lse[:, first:last] = logits.logsumexp(-1)
        sinks = torch.full((len(logits),), float("-inf")) if s_aux is None else s_aux
        sinks = sinks.double()[:, None, None].expand(-1, last - first, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return (out, lse) if return_softmax_lse else None


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *ignored: Any,
) -> None:
    """Write keys and values [T, H, D] to caches [blocks, block_size, H, D]."""
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    page = key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slots // page, slots % page] = new[: len(slot_mapping)][used]
