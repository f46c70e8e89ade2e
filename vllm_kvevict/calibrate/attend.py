"""Attention that calibrate computes itself: of a prompt, or of rows of text after one context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from vllm_kvevict.ops.torch.sinks import attention_weights

ROWS = 2**23
"""Most attention weights that stand in memory at once."""


@dataclass(frozen=True)
class Kind:
    """Scale, soft cap, window and sinks of a layer's attention.

    Args:
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        window: Tokens that a query sees, its own included; None for all.
        sinks: [H, G] float32 attention sinks, None for none.

    """

    scale: float
    softcap: float = 0.0
    window: int | None = None
    sinks: torch.Tensor | None = None


def of_prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Causal attention over one prompt.

    Args:
        q: [H, G, N, D].
        k: [H, N, D].
        v: [H, N, V].
        kind: The layer's.

    Returns:
        [H, G, N, V].

    """
    plain = not kind.softcap and kind.window is None and kind.sinks is None
    # With values of another size PyTorch would hold the weights of all queries at once.
    if plain and k.shape == v.shape:
        heads, group, tokens, _ = q.shape
        # A group's queries on one KV head: keys are not repeated in memory.
        k, v = (x[:, None].expand(heads, group, -1, -1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scale)
    found = q.new_empty(*q.shape[:3], v.shape[-1])
    tokens = q.shape[2]
    step = max(1, ROWS // (q.shape[0] * q.shape[1] * tokens))
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        own = k[None, :, begin:end], v[None, :, begin:end]
        weights = weights_behind(q[None, :, :, begin:end], k[:, :begin], own[0], kind, None)
        found[:, :, begin:end] = apply(weights, v[:, :begin], own[1])[0].to(q.dtype)
    return found


def weights_behind(
    q: torch.Tensor,
    keys: torch.Tensor,
    own: torch.Tensor,
    kind: Kind,
    keep: torch.Tensor | None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention weights of R rows of T tokens, each directly after the same context.

    Args:
        q: [R, H, G, T, D].
        keys: [H, n, D]: the context's.
        own: [R, H, T, D]: keys of the rows themselves.
        kind: The layer's.
        keep: [R, H, n] bool: what of the context each row sees; None for all.
        lengths: Lengths of the texts that each row consists of, whose sum is T. Each text begins
            directly after the context and sees no other. None for one text.

    Returns:
        [R, H, G, T, n + T] float32.

    """
    rows, heads, group, tokens, _ = q.shape
    context = keys.shape[1]
    q = (q.float() * kind.scale).flatten(2, 3)
    logits = torch.cat([q @ keys.float().mT, q @ own.float().mT], dim=-1)
    logits = logits.view(rows, heads, group, tokens, context + tokens)
    if kind.softcap:
        logits = logits.div_(kind.softcap).tanh_().mul_(kind.softcap)
    at = positions_behind(context, lengths or [tokens], q.device)
    column = torch.cat([torch.arange(context, device=q.device), at])
    at = at[:, None]
    hidden = column > at
    if kind.window is not None:
        hidden |= column <= at - kind.window
    if lengths is not None:
        text = torch.arange(len(lengths), device=q.device)
        text = text.repeat_interleave(torch.tensor(lengths, device=q.device))
        hidden[:, context:] |= text != text[:, None]
    logits.masked_fill_(hidden, float("-inf"))
    if keep is not None:
        logits[..., :context].masked_fill_(~keep[:, :, None, None], float("-inf"))
    sinks = None if kind.sinks is None else kind.sinks[None, :, :, None]
    return attention_weights(logits, sinks)


def packed(
    texts: Sequence[Sequence[int]], queries: int, context: int
) -> Iterator[list[Sequence[int]]]:
    """Texts that are computed together in one row, because their weights fit in memory.

    Args:
        texts: Token ids.
        queries: Query heads of a layer.
        context: Tokens of the context that all of them follow.

    """
    some: list[Sequence[int]] = []
    tokens = 0
    for text in texts:
        more = tokens + len(text)
        if some and queries * more * (context + more) > ROWS:
            yield some
            some, more = [], len(text)
        some.append(text)
        tokens = more
    if some:
        yield some


def positions_behind(context: int, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[sum of lengths] positions of texts that each begin directly after the context."""
    texts = [torch.arange(context, context + length, device=device) for length in lengths]
    return torch.cat(texts)


def apply(weights: torch.Tensor, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[R, H, G, T, V] float32: weights of :func:`weights_behind` on context and rows' values."""
    context = values.shape[1]
    flat = weights.flatten(2, 3)
    found = flat[..., :context] @ values.float() + flat[..., context:] @ own.float()
    return found.unflatten(2, weights.shape[2:4])
