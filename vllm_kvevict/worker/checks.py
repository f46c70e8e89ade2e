"""Checks of the model's layers: kinds of attention that cannot evict."""

from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from vllm_kvevict.cache.spec import is_evictable


def check_specs(specs: dict[str, KVCacheSpec]) -> None:
    """Refuse kinds of layers that the configuration does not always reveal.

    Raises:
        ValueError: A layer is unsupported. The message names the layer and the reason.

    """
    for name, spec in specs.items():
        # Recurrent layers keep one state of constant size, which is never evicted.
        supported = isinstance(spec, (AttentionSpec, MambaSpec))
        if not supported or (isinstance(spec, MLAAttentionSpec) and not is_evictable(spec)):
            raise ValueError(
                f"KV eviction does not support {type(spec).__name__} (layer {name}), because its "
                "state cannot be dropped token by token: serve this model without --kv-eviction."
            )
    kinds = {type(spec) for spec in specs.values()}
    if MLAAttentionSpec in kinds and len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            "KV eviction does not support latent caches (MLA) together with other layers "
            f"({names}), which is untested: serve this model without --kv-eviction."
        )


def check_layer(name: str, layer: Any) -> None:
    """Refuse attention that depends on more than the kept keys and values.

    Raises:
        ValueError: The layer is unsupported. The message gives the reason.

    """
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        raise ValueError(
            "KV eviction does not support ALiBi biases, which need the position of every key "
            f"(layer {name}): serve this model without --kv-eviction."
        )
    scales = (getattr(layer, name, None) for name in ("_q_scale", "_k_scale", "_v_scale"))
    if any(scale is not None and scale.numel() > 1 for scale in scales):
        raise ValueError(
            "KV eviction needs one FP8 scale per layer, and this checkpoint has a scale for each "
            f"KV head (layer {name}): serve it without --kv-cache-dtype fp8 or without "
            "--kv-eviction."
        )
    if getattr(layer, "use_sparse", False):
        raise ValueError(
            "KV eviction does not support sparse attention, because its indexer keeps every token "
            f"in a separate cache (layer {name}): serve this model without --kv-eviction."
        )
    # A latent cache holds no values.
    if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        raise ValueError(
            "KV eviction does not support values of another size than their keys (layer "
            f"{name}): serve this model without --kv-eviction."
        )
