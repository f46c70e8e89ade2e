"""The spec: who may share a group, and how vLLM splits layers that may not."""

import importlib
from dataclasses import replace

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tests.engine.harness import Setup, make_scheduler, vllm_config
from tests.versions import PLANNING
from vllm_kvevict.cache.spec import EvictableAttentionSpec, is_evictable
from vllm_kvevict.engine.blocks import EvictableAttentionManager, register_spec
from vllm_kvevict.rules.rule import EvictionRule

SHAPE = dict(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
FULL = FullAttentionSpec(**SHAPE)
get_kv_cache_groups = importlib.import_module(PLANNING).get_kv_cache_groups


def evictable(budget: int) -> EvictableAttentionSpec:
    return EvictableAttentionSpec.from_spec(FULL, EvictionRule(16, 8, 64, budget_tokens=budget))


def test_keeps_what_the_full_attention_spec_said():
    spec = evictable(64)
    for name in ("block_size", "num_kv_heads", "head_size", "dtype", "page_size_bytes"):
        assert getattr(spec, name) == getattr(FULL, name)
    assert spec.rule == EvictionRule(16, 8, 64, budget_tokens=64)


def test_merge_keeps_the_rule():
    merged = EvictableAttentionSpec.merge([evictable(64), evictable(64)])
    assert merged == evictable(64)


@pytest.mark.parametrize("other", [evictable(128), FULL])
def test_merge_refuses_unequal_layers_the_way_vllm_expects(other):
    with pytest.raises(AssertionError, match="cannot share a KV-cache group"):
        EvictableAttentionSpec.merge([evictable(64), other])


def test_uniform_only_with_its_equals():
    spec = evictable(64)
    assert spec.is_uniform_with_collection({"a": evictable(64), "b": spec})
    assert not spec.is_uniform_with_collection({"a": spec, "b": evictable(65)})
    assert not spec.is_uniform_with_collection({"a": spec, "b": FULL})


def groups(specs):
    register_spec()
    return get_kv_cache_groups(vllm_config(Setup()), specs)


def test_equal_budgets_share_a_group():
    (group,) = groups({f"layer.{i}": evictable(64) for i in range(4)})
    assert group.kv_cache_spec == evictable(64)
    assert len(group.layer_names) == 4


def test_two_budgets_land_in_two_groups():
    split = groups({f"layer.{i}": evictable(64 if i < 2 else 128) for i in range(4)})
    found = {g.kv_cache_spec.rule.budget_tokens: sorted(g.layer_names) for g in split}
    assert found == {64: ["layer.0", "layer.1"], 128: ["layer.2", "layer.3"]}


def test_layers_that_do_not_evict_get_a_group_of_their_own():
    sliding = SlidingWindowSpec(**SHAPE, sliding_window=32)
    split = groups({"a": evictable(64), "b": sliding})
    kinds = {type(g.kv_cache_spec): g.layer_names for g in split}
    assert kinds == {EvictableAttentionSpec: ["a"], SlidingWindowSpec: ["b"]}


def test_rule_follows_the_block_size():
    resized = replace(evictable(64), block_size=64)
    assert resized.rule == EvictionRule(64, 8, 64, budget_tokens=64)
    assert resized.rule.stride == 64 and evictable(64).rule.block_size == 16


@pytest.mark.parametrize(
    "spec, yes",
    [
        (FULL, True),
        (evictable(64), False),
        (SlidingWindowSpec(**SHAPE, sliding_window=32), False),
        (replace(FULL, sliding_window=32), False),
        (replace(FULL, attention_chunk_size=32), False),
        (replace(FULL, non_causal=True), False),
    ],
)
def test_only_plain_causal_full_attention_is_evictable(spec, yes):
    assert is_evictable(spec) is yes


def test_registration_is_idempotent_and_names_our_manager():
    register_spec()
    register_spec()
    assert KVCacheSpecRegistry.get_manager_class(evictable(64)) is EvictableAttentionManager
    assert KVCacheSpecRegistry.get_manager_class(FULL) is FullAttentionManager
    (manager,) = make_scheduler(Setup()).kv_cache_manager.coordinator.single_type_managers
    assert type(manager) is EvictableAttentionManager


def test_a_latent_cache_keeps_its_form():
    """One vector a token, no values, and what else vLLM tells of it."""
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.float32
    )
    rules = [EvictionRule(16, 8, 64, budget_tokens=budget) for budget in (64, 64, 128)]
    specs = [EvictableAttentionSpec.from_spec(latent, rule) for rule in rules]
    merged = type(specs[0]).merge(specs[:2])
    assert isinstance(merged, MLAAttentionSpec) and merged.rule == rules[0]
    assert merged.page_size_bytes == latent.page_size_bytes == 16 * 576 * 4
    assert merged.max_tp_shards == 1 and merged.head_size_v == 0
    register_spec()
    assert KVCacheSpecRegistry.get_manager_class(merged) is EvictableAttentionManager
    with pytest.raises(AssertionError, match="different eviction rules"):
        type(specs[0]).merge(specs)
