"""The KV-cache spec of a layer that evicts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, replace_as

from vllm_kvevict.rules.rule import EvictionRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class EvictableAttentionSpec(FullAttentionSpec):
    """Spec of a full-attention layer that follows an eviction rule.

    Layers share a KV-cache group, and so a block table, only if their rules are equal.
    """

    rule: EvictionRule | None = None
    """Never None in use. It has a default only because fields of the base class have one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule is not None and self.rule.block_size != self.block_size:
            # vLLM resizes blocks of hybrid models after the worker has named its specs.
            rule, size = self.rule, self.block_size
            page_tokens = rule.page_tokens * size // rule.block_size
            rule = replace(rule, block_size=size, page_tokens=page_tokens)
            object.__setattr__(self, "rule", rule)

    @staticmethod
    def from_spec(spec: FullAttentionSpec, rule: EvictionRule) -> "EvictableAttentionSpec":
        """Return the evictable form of a full-attention spec."""
        latent = isinstance(spec, MLAAttentionSpec)
        kind = EvictableLatentSpec if latent else EvictableAttentionSpec
        return replace_as(spec, kind, rule=rule)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge the specs of one group.

        Raises:
            AssertionError: The rules differ; vLLM then splits the layers into groups.

        """
        assert all(isinstance(spec, cls) for spec in specs), (
            "layers with and without KV eviction cannot share a KV-cache group"
        )
        assert len({spec.rule for spec in specs}) == 1, (
            "layers with different eviction rules cannot share a KV-cache group"
        )
        return replace(super().merge(specs), rule=specs[0].rule)

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        """Return the bytes that a request of maximum length needs at most, with eviction."""
        without_eviction = super().max_memory_usage_bytes(vllm_config)
        if self.rule is None:
            return without_eviction
        blocks = self.rule.max_blocks(vllm_config.model_config.max_model_len)
        return min(without_eviction, blocks * self.page_size_bytes)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return True if all layers follow the same rule and can share one block table."""
        return all(
            isinstance(spec, EvictableAttentionSpec) and spec.rule == self.rule
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class EvictableLatentSpec(EvictableAttentionSpec, MLAAttentionSpec):
    """Spec of a latent cache (MLA): one head of keys, in which the values are the first part."""

    head_size_v: int = 0


def is_evictable(spec: KVCacheSpec) -> bool:
    """Return True if a layer with this spec can evict, that is, has plain causal full attention."""
    return (
        (type(spec) is FullAttentionSpec or (type(spec) is MLAAttentionSpec and _is_dense(spec)))
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
        and spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.tokens_per_state == 1
    )


def _is_dense(spec: MLAAttentionSpec) -> bool:
    """Return True if a layer with a latent cache attends to all of its tokens."""
    return (
        spec.alignment is None
        and spec.model_version is None
        and not spec.is_index_group_leader
        and not spec.non_causal_multi_token_decode
    )
