"""Greedy answers over an evicted prefill, many evictions at once. Imported by .venv-kvpress alone.

The rows of a batch differ only in which cached tokens each head still sees. The prefill's keys
are therefore shared between the rows, and each row brings a mask.
"""

import torch
from kvpress import BasePress
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.quality.kvpress_kept import LayerPrefill

ATTENTION = "kvevict_kept"


def attend_kept(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention over the kept tokens of a shared prefill and over a row's own new tokens.

    Without ``module.kept`` this is transformers' SDPA attention.

    Args:
        module: Its ``kept`` holds keys and values [H, n, D] and a mask [C, H, n].
        query: [C, Hq, t, D], the last t of the new tokens.
        key: [C, H, m, D], all new tokens, causal among themselves.
        value: [C, H, m, D].
        attention_mask: Unused: a new token sees what is kept and what precedes it.
        scaling: Softmax scale.
        kwargs: Passed on to SDPA.

    Returns:
        [C, t, Hq, D], and None for the weights.

    """
    if getattr(module, "kept", None) is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    keys, values, mask = module.kept
    new, steps = key.shape[2], query.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1)) * scaling
    old_logits = torch.einsum("chgtd,hnd->chgtn", grouped, keys)
    old_logits.masked_fill_(~mask[:, :, None, None], float("-inf"))
    new_logits = torch.einsum("chgtd,chmd->chgtm", grouped, key)
    seen = torch.ones(steps, new, dtype=torch.bool).tril(new - steps)
    new_logits.masked_fill_(~seen, float("-inf"))
    weights = torch.cat([old_logits, new_logits], -1).softmax(-1)
    old, own = weights.split([keys.shape[1], new], -1)
    mixed = torch.einsum("chgtn,hnd->chgtd", old, values)
    mixed += torch.einsum("chgtm,chmd->chgtd", own, value)
    return mixed.flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend_kept)


def stop_tokens(model: PreTrainedModel) -> set[int]:
    """Token ids that end an answer."""
    stop = model.generation_config.eos_token_id
    return set(stop if isinstance(stop, list) else [] if stop is None else [stop])


def cut(answer: list[int], stop: set[int]) -> list[int]:
    """The answer up to and with its first stop token."""
    for index, token in enumerate(answer):
        if token in stop:
            return answer[: index + 1]
    return answer


def decode_kept(
    model: PreTrainedModel,
    layers: list[LayerPrefill],
    masks: list[torch.Tensor],
    ids: list[int],
    max_new: int,
) -> list[list[int]]:
    """Read ``ids`` after each of C evicted prefills, then answer greedily.

    Args:
        model: Loaded with ``attn_implementation=ATTENTION``.
        layers: The prefill.
        masks: [C, H, E] bool per layer: what is kept of the first E tokens.
        ids: Tokens at positions E, E + 1, ...: the same for every row.
        max_new: Most tokens to generate after ``ids``.

    Returns:
        C lists of generated tokens, each up to its stop token.

    """
    rows, point = masks[0].shape[0], masks[0].shape[2]
    stop = stop_tokens(model)
    for layer, mask in zip(layers, masks, strict=True):
        layer.module.kept = (layer.keys[0, :, :point], layer.values[0, :, :point], mask)
    try:
        cache = DynamicCache()
        tokens = torch.tensor([ids]).expand(rows, -1)
        position, answers = point, []
        ended = torch.zeros(rows, dtype=torch.bool)
        for _ in range(max_new):
            positions = torch.arange(position, position + tokens.shape[1])[None].expand(rows, -1)
            position += tokens.shape[1]
            logits = model(
                tokens, past_key_values=cache, position_ids=positions, logits_to_keep=1
            ).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            answers.append(tokens[:, 0])
            ended |= torch.tensor([token in stop for token in answers[-1].tolist()])
            if ended.all():
                break
    finally:
        for layer in layers:
            layer.module.kept = None
    columns = torch.stack(answers, 1).tolist() if answers else [[]] * rows
    return [cut(column, stop) for column in columns]


def decode_with_press(
    model: PreTrainedModel, press: BasePress, ids: list[int], point: int, max_tokens: int
) -> list[int]:
    """One answer as kvpress's own pipeline makes it: the oracle of :func:`decode_kept`.

    The question is read token by token: AdaKVPress hides a key by putting it where all queries of
    a step score it low, and for a question's worth of queries such a place need not exist.

    Args:
        model: Loaded with ``attn_implementation="sdpa"``, which kvpress patches.
        press: Used as a context manager around the prefill of the first ``point`` tokens.
        ids: The whole prompt.
        point: Where it is compressed.
        max_tokens: Most tokens to generate.

    """
    cache, stop = DynamicCache(), stop_tokens(model)
    with press(model):
        output = model(torch.tensor([ids[:point]]), past_key_values=cache, logits_to_keep=1)
    answer = []
    for position in range(point, len(ids) + max_tokens):
        if position >= len(ids):
            answer.append(int(output.logits[0, -1].argmax()))
            if answer[-1] in stop or len(answer) == max_tokens:
                break
        token = ids[position] if position < len(ids) else answer[-1]
        output = model(
            torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[position]])
        )
    return answer
