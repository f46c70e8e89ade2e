"""What the worker refuses when it sees the real layers."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from vllm_kvevict.cache.spec import is_evictable
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.worker import mixin
from vllm_kvevict.worker.checks import check_layer, check_specs
from vllm_kvevict.worker.cpu import EvictingCPUWorker
from vllm_kvevict.worker.gpu import EvictingWorker

FULL = dict(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
LATENT = FULL | dict(num_kv_heads=1, head_size=576)


def test_plain_layers_pass():
    check_specs({"latent": MLAAttentionSpec(**LATENT)})
    state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    check_specs({"a": FullAttentionSpec(**FULL), "recurrent": state})
    impl = SimpleNamespace(alibi_slopes=None, sinks=torch.ones(2))
    check_layer("a", SimpleNamespace(impl=impl, head_size=64, head_size_v=64))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (KVCacheSpec(block_size=32), "KVCacheSpec"),
        (MLAAttentionSpec(**LATENT, is_index_group_leader=True), "MLAAttentionSpec"),
        (MLAAttentionSpec(**LATENT, state_content_bytes=656), "MLAAttentionSpec"),
        (MLAAttentionSpec(**LATENT, tokens_per_state=4), "MLAAttentionSpec"),
        (MLAAttentionSpec(**LATENT, model_version="deepseek_v4"), "MLAAttentionSpec"),
        (MLAAttentionSpec(**LATENT, non_causal_multi_token_decode=True), "MLAAttentionSpec"),
    ],
)
def test_state_that_cannot_lose_tokens_is_refused(spec, name):
    with pytest.raises(ValueError, match=name):
        check_specs({"a": FullAttentionSpec(**FULL), "b": spec})


def test_latent_caches_beside_other_layers_are_refused():
    latent = MLAAttentionSpec(**LATENT)
    check_specs({"a": latent, "b": latent})
    for other in (FullAttentionSpec(**FULL), SlidingWindowMLASpec(**LATENT, sliding_window=64)):
        with pytest.raises(ValueError, match="together with other layers"):
            check_specs({"a": latent, "b": other})


def test_attention_that_needs_more_than_keys_is_refused():
    impl = SimpleNamespace(alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="ALiBi"):
        check_layer("a", SimpleNamespace(impl=impl))
    plain = SimpleNamespace(alibi_slopes=None)
    with pytest.raises(ValueError, match="values of another size"):
        check_layer("a", SimpleNamespace(impl=plain, head_size=64, head_size_v=32))


def test_sparse_attention_is_refused():
    layer = dict(impl=SimpleNamespace(), head_size=576)
    check_layer("a", SimpleNamespace(**layer, use_sparse=False))
    with pytest.raises(ValueError, match="sparse attention"):
        check_layer("a", SimpleNamespace(**layer, use_sparse=True))


def test_scales_of_each_head_are_refused():
    impl = SimpleNamespace(alibi_slopes=None)
    layer = dict(impl=impl, head_size=64, head_size_v=64, _q_scale=torch.ones(()))
    check_layer("a", SimpleNamespace(**layer, _k_scale=torch.ones(1)))
    with pytest.raises(ValueError, match="needs one FP8 scale per layer"):
        check_layer("a", SimpleNamespace(**layer, _k_scale=torch.ones(2)))


@pytest.mark.parametrize(
    "change", [dict(sliding_window=64), dict(attention_chunk_size=64), dict(non_causal=True)]
)
def test_only_plain_full_attention_is_evictable(change):
    assert is_evictable(FullAttentionSpec(**FULL))
    assert not is_evictable(FullAttentionSpec(**FULL, **change))


@pytest.mark.parametrize("heads, size", [((8, 4), (64, 64)), ((8, 8), (64, 128))])
def test_layers_whose_queries_differ_are_refused(heads, size, monkeypatch):
    """One ring has the queries of all."""
    rank = EvictingCPUWorker.__new__(EvictingCPUWorker)
    rank.vllm_config = None
    rank.eviction_config, rank._rings = EvictionConfig(policy="snapkv"), None
    rank._evictable_layers = ["a", "b"]
    impls = [SimpleNamespace(num_heads=n, head_size=d) for n, d in zip(heads, size, strict=True)]
    layers = dict(a=SimpleNamespace(impl=impls[0]), b=SimpleNamespace(impl=impls[1]))
    monkeypatch.setattr(rank, "_layer", layers.get)
    monkeypatch.setattr(mixin, "ring_slots", lambda vllm_config, config: 4)
    with pytest.raises(ValueError, match="same number of query heads and head size"):
        rank._allocate_rings()


@pytest.mark.parametrize("worker", [EvictingCPUWorker, EvictingWorker])
def test_padded_caches_are_refused(worker):
    layer = SimpleNamespace(kv_cache=torch.zeros(4, 3 * 64)[:, :128].view(4, 2, 64))
    with pytest.raises(ValueError, match="vLLM pads this model's KV cache"):
        worker._layer_cache(worker.__new__(worker), layer, FullAttentionSpec(**FULL))
