"""Centres of keys: what stores in few bits subtract from every key of a head.

A bias of the key projection, as Qwen2 and Qwen2.5 have it, is a constant part of all keys, and may
be a hundred times as large as the rest. The rotation of
:class:`~vllm_kvevict.ops.token_format.PackedFormat` spreads it over all dimensions, where it
decides about every scale. The rotary embedding leaves it nearly constant in the dimensions that it
turns slowly, so stores hold keys without the mean of the rotated bias, and attention adds the
product of the query and this mean to the logits of stored tokens. (SageAttention, section 3.2,
arXiv 2410.02367, subtracts the mean of the keys for the same reason. Its softmax is over such keys
alone, where the product cancels; here the tail has other keys.)

The centres follow from the weights alone, so that all servers of a model have the same: the
fingerprint of files contains the weights, and the name of the format contains :data:`.POSITIONS`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import QKVParallelLinear

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.token_format import POSITIONS, PackedFormat, TokenFormat
from vllm_kvevict.worker.rotary import find

logger = init_logger("vllm.kv_eviction.worker")

AT_ONCE = 512
"""Positions for which a bias is rotated at once."""

SAMPLES = 64
"""Random inputs of a layer that the check encodes."""

MOST_LOST = 0.05
"""Largest squared error of stored keys, as a share of their variance, without a warning. Five bits
without a constant part have 0.004, and three bits 0.04."""


def key_centres(model: nn.Module, layer: Any, token_format: TokenFormat) -> torch.Tensor | None:
    """Return what stores subtract from the keys of a layer.

    Args:
        model: The model, with its weights.
        layer: One of its attention layers.
        token_format: Format of the tokens of stores.

    Returns:
        [H, D] float32, zeros without a bias; None for a format that subtracts nothing.

    """
    if not isinstance(token_format, PackedFormat):
        return None
    heads, size = layer.impl.num_kv_heads, layer.impl.head_size
    device = next(model.parameters()).device
    projection = _projection(model, layer)
    if projection is None:
        return torch.zeros(heads, size, device=device)
    inputs = torch.zeros(1, projection.hidden_size, dtype=_dtype(model), device=device)
    bias = _keys(projection, inputs)
    rotary = find(model, layer)
    if rotary is None or not bool(bias.any()):
        return bias[0]
    table = getattr(rotary.module, "cos_sin_cache", None)
    count = POSITIONS if table is None else min(POSITIONS, len(table))
    total = torch.zeros_like(bias[0])
    for positions in torch.arange(count, device=device).split(AT_ONCE):
        keys = bias.expand(len(positions), -1, -1).flatten(1)
        total += rotary.rotated(positions, keys).sum(0).view(total.shape)
    return total / count


def keys_lost(model: nn.Module, layer: Any, cache: LayerCache) -> torch.Tensor:
    """Return what a store in few bits loses of a layer's keys, estimated with random inputs.

    Args:
        model: The model, with its weights.
        layer: One of its attention layers.
        cache: The layer's cache.

    Returns:
        [H] float32: mean squared error of stored keys over the variance of the keys without their
        bias; 0 without a bias.

    """
    projection = None if cache.centres is None else _projection(model, layer)
    if projection is None or cache.centres is None:
        return torch.zeros(layer.impl.num_kv_heads)
    device, dtype = cache.centres.device, _dtype(model)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, projection.hidden_size, generator=generator)
    inputs = inputs.to(device, dtype)
    norm = getattr(_above(model, layer, 2), "input_layernorm", None)
    if norm is not None:
        inputs = norm(inputs)
    keys = _keys(projection, inputs)
    bias = _keys(projection, torch.zeros_like(inputs[:1]))
    spread = (keys - bias).square().sum(-1).mean(0)
    rotary = find(model, layer)
    if rotary is not None:
        positions = torch.arange(SAMPLES, device=device) * (POSITIONS // SAMPLES)
        if (table := getattr(rotary.module, "cos_sin_cache", None)) is not None:
            positions %= len(table)
        keys = rotary.rotated(positions, keys.flatten(1)).view(keys.shape)
    centred = keys - cache.centres
    stored = cache.token_format.decode(cache.token_format.encode(centred, centred))[0]
    return ((stored - centred).square().sum(-1).mean(0) / spread).cpu()


def warn_of_lost_keys(
    model: nn.Module, layers: dict[str, Any], cache_of: Callable[[str], LayerCache]
) -> None:
    """Log a warning if stores in few bits lose too much of the keys of some layers."""
    lost = {
        name: float(keys_lost(model, layer, cache_of(name)).max()) for name, layer in layers.items()
    }
    bad = {name: share for name, share in lost.items() if not share <= MOST_LOST}
    if bad:
        worst = max(bad, key=bad.__getitem__)
        logger.warning(
            "KV eviction: stores in few bits lose much of the keys of %d of %d layers (%s: an "
            "error of %.2f of the variance), because their bias is large in dimensions that the "
            "rotary embedding turns fast: set --kv-eviction-store-dtype to auto.",
            len(bad),
            len(lost),
            worst,
            bad[worst],
        )


def _dtype(model: nn.Module) -> torch.dtype:
    return next(
        p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1
    )


def _above(model: nn.Module, layer: nn.Module, levels: int) -> nn.Module:
    """Return an ancestor of a layer."""
    path = next(name for name, module in model.named_modules() if module is layer)
    return model.get_submodule(".".join(path.split(".")[:-levels]))


def _projection(model: nn.Module, layer: Any) -> Any:
    """Return the projection of a layer's queries, keys and values; None if it has no bias, is not
    known (the layers of a drafter are not in the model), or if its keys are normalised, which
    bounds them."""
    if not any(module is layer for module in model.modules()):
        return None
    above = _above(model, layer, 1)
    found = [module for module in above.modules() if isinstance(module, QKVParallelLinear)]
    if len(found) != 1 or getattr(found[0], "bias", None) is None:
        return None
    if any("norm" in name for name, _ in above.named_modules()):
        return None
    return found[0] if found[0].head_size == layer.impl.head_size else None


def _keys(projection: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return the keys [N, H, D] float32 of inputs [N, hidden size], before they are rotated."""
    found = projection(inputs)
    if isinstance(found, tuple):
        found = found[0] if found[1] is None else found[0] + found[1]
    begin, size = projection.num_heads * projection.head_size, projection.head_size
    keys = found[:, begin : begin + projection.num_kv_heads * size]
    return keys.float().unflatten(1, (-1, size))
