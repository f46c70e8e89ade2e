"""What only the layers themselves reveal: kinds of attention that cannot evict."""

from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from vllm_kvevict.cache.spec import is_evictable


def check_specs(specs: dict[str, KVCacheSpec]) -> None:
    """Refuse kinds of layers that the configuration does not always reveal.

    Raises:
        ValueError: In one sentence, which layer and why.

    """
    for name, spec in specs.items():
        # Recurrent layers keep one state, which stays.
        known = isinstance(spec, (AttentionSpec, MambaSpec))
        if not known or (isinstance(spec, MLAAttentionSpec) and not is_evictable(spec)):
            raise ValueError(
                f"KV eviction does not support {type(spec).__name__} (layer {name}), whose state "
                "cannot be dropped token by token: serve this model without --kv-eviction."
            )
    kinds = {type(spec) for spec in specs.values()}
    if MLAAttentionSpec in kinds and len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"KV eviction does not support latent caches (MLA) beside other layers ({names}), "
            "which has not been tried: serve this model without --kv-eviction."
        )


def check_layer(name: str, layer: Any) -> None:
    """Refuse attention whose result depends on more than the kept keys and values.

    Raises:
        ValueError: In one sentence, what the layer does that eviction cannot.

    """
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        raise ValueError(
            "KV eviction does not support ALiBi biases, which need every key's position (layer "
            f"{name}): serve this model without --kv-eviction."
        )
    scales = (getattr(layer, name, None) for name in ("_q_scale", "_k_scale", "_v_scale"))
    if any(scale is not None and scale.numel() > 1 for scale in scales):
        raise ValueError(
            "KV eviction does not support FP8 scales of each KV head, as this checkpoint has them "
            f"(layer {name}), but one a layer: serve it without --kv-cache-dtype fp8 or without "
            "--kv-eviction."
        )
    if getattr(layer, "use_sparse", False):
        raise ValueError(
            "KV eviction does not support sparse attention, whose indexer keeps every token in a "
            f"cache of its own (layer {name}): serve this model without --kv-eviction."
        )
    # A latent cache holds no values.
    if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        raise ValueError(
            "KV eviction does not support values of another size than their keys (layer "
            f"{name}): serve this model without --kv-eviction."
        )
