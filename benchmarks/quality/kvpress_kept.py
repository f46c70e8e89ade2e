"""What kvpress keeps of a prompt that was prefilled once. Imported by .venv-kvpress alone.

kvpress compresses a layer after its full attention, so nothing of a prefill depends on the press
or its ratio: every (press, budget) can be asked of one and the same prefill.
"""

from dataclasses import dataclass

import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    CriticalAdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
)
from torch import nn
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Settings:
    """Window, pooling width (kvpress averages), sinks, and AdaKVPress's ``alpha_safeguard``."""

    window: int = 32
    kernel: int = 5
    sinks: int = 4
    safeguard: float = 0.2


@dataclass(frozen=True)
class LayerPrefill:
    """One attention layer after the prefill of n tokens.

    ``hidden`` [1, n, hidden size] went into the attention, ``rotary`` are the cosines and sines
    [1, n, D], ``keys`` and ``values`` [1, H, n, D] are its cache.
    """

    module: nn.Module
    hidden: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor


def prefill(model: PreTrainedModel, ids: list[int]) -> tuple[list[LayerPrefill], int]:
    """Full attention over a prompt; the layers, and the greedy next token."""
    inputs: list[tuple[nn.Module, dict]] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: inputs.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    try:
        logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
    finally:
        for hook in hooks:
            hook.remove()
    for module, _ in inputs:
        # As kvpress's context manager does: ExpectedAttentionPress asks a layer for it.
        module.rotary_emb = model.model.rotary_emb
    layers = [
        LayerPrefill(
            module, kwargs["hidden_states"], kwargs["position_embeddings"],
            cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values,
        )
        for module, kwargs in inputs
    ]  # fmt: skip
    return layers, int(logits[0, -1].argmax())


def make_press(name: str, point: int, keep: int, settings: Settings) -> BasePress:
    """A press that keeps ``keep`` of ``point`` tokens per head, on average over the heads.

    Half a token more, because kvpress rounds down what it keeps.

    Raises:
        ValueError: The name is not one of kvpress's baselines.

    """
    ratio = 1 - (keep + 0.5) / point
    snapkv = SnapKVPress(ratio, window_size=settings.window, kernel_size=settings.kernel)
    presses: dict[str, BasePress] = {
        "snapkv": snapkv,
        "ada-snapkv": AdaKVPress(snapkv, settings.safeguard),
        "critical-ada-snapkv": CriticalAdaKVPress(snapkv, settings.safeguard),
        "expected-attention": ExpectedAttentionPress(ratio),
        "keydiff": KeyDiffPress(ratio),
        "streaming-llm": StreamingLLMPress(ratio, n_sink=settings.sinks),
    }
    if name not in presses:
        raise ValueError(f"no press for {name!r}; choose from {', '.join(presses)}")
    return presses[name]


def kept_masks(
    layer: LayerPrefill, point: int, presses: list[tuple[str, int]], settings: Settings
) -> torch.Tensor:
    """Which of the first ``point`` tokens each press keeps in each head of a layer.

    Asks ``press.compress`` with the layer's tensors cut at ``point``. Where it returns what it
    kept, it gets positions in the place of the values. Scores depend on no ratio and are computed
    once.

    Args:
        layer: A layer of the prefill.
        point: Tokens that kvpress gets to see; it compresses at their end.
        presses: (name, tokens to keep) pairs; ``keep == point`` compresses nothing.
        settings: Parameters of the presses.

    Returns:
        [len(presses), H, point] bool.

    """
    hidden, keys = layer.hidden[:, :point], layer.keys[:, :, :point]
    values = layer.values[:, :, :point]
    kwargs = {"position_embeddings": tuple(part[:, :point] for part in layer.rotary)}
    position = torch.arange(point)[None, None, :, None].expand_as(keys)
    scores: dict[type, torch.Tensor] = {}
    masks = torch.zeros(len(presses), keys.shape[1], point, dtype=torch.bool)
    for mask, (name, keep) in zip(masks, presses, strict=True):
        if keep >= point:
            mask.fill_(True)
            continue
        press = make_press(name, point, keep, settings)
        adaptive = not isinstance(press, ScorerPress)
        scorer = press.press if adaptive else press
        # StreamingLLMPress scores by the ratio, and costs nothing.
        if not isinstance(scorer, StreamingLLMPress):
            kind = type(scorer)
            if kind not in scores:
                scores[kind] = scorer.score(layer.module, hidden, keys, values, None, kwargs)
            # AdaKVPress writes into the scores it is given.
            scorer.score = lambda *_, computed=scores[kind]: computed.clone()
        given = values if adaptive else position
        _, survivors = press.compress(layer.module, hidden, keys, given, None, kwargs)
        if adaptive:
            _, heads, positions = layer.module.masked_key_indices
            mask.fill_(True)
            mask[heads, positions] = False
            layer.module.masked_key_indices = None
        else:
            mask.scatter_(1, survivors[0, :, :, 0].long(), True)
    return masks
