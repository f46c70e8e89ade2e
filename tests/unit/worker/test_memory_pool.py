"""What sleep mode frees is allocated in vLLM's memory pools."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from benchmarks.gpu.dummy_profile import random_probes
from tests.pretend_allocator import Allocator
from tests.tensors import tensors_of
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.serving.profile import read, to_json
from vllm_kvevict.worker import mixin
from vllm_kvevict.worker.gpu import EvictingWorker

LAYERS, HEADS, GROUP, SIZE, BLOCK, BLOCKS = 2, 2, 4, 64, 16, 8
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
DEVICE = torch.device("meta")
"""No host memory is taken for one of it, and whatever comes to it is allocated there."""


@pytest.fixture
def pool(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(
        Worker, "_maybe_get_memory_pool_context", lambda worker, tag: made.use_memory_pool(tag)
    )
    return made


@pytest.fixture
def profile(tmp_path) -> Profile:
    """With two probes, prose and networks; keys are not rotated."""
    identity = ModelIdentity(architecture="any", layers=LAYERS, kv_heads=HEADS, config="any")
    shares = ((1.0,) * HEADS,) * LAYERS
    made = Profile(model=identity, policy="probe", budget=96, layers=(1.0,) * LAYERS, heads=shares)
    weights = replace(random_probes(LAYERS, HEADS, SIZE), rotated=(False,) * LAYERS)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(to_json(made, weights)))
    return read(path)


def layer() -> Any:
    """An attention layer of vLLM, as far as the worker reads it."""
    impl = SimpleNamespace(
        num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_size=SIZE, scale=1.0, logits_soft_cap=0.0
    )
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16, device=DEVICE)
    scales = dict.fromkeys(("_q_scale_float", "_k_scale_float", "_v_scale_float"), 1.0)
    return SimpleNamespace(impl=impl, kv_cache=cache, head_size=SIZE, query_quant=None, **scales)


@pytest.fixture
def started(build, pool, profile, monkeypatch) -> EvictingWorker:
    """The CUDA worker after vLLM has made the KV cache."""
    monkeypatch.setattr(Worker, "initialize_from_config", lambda worker, config: None)
    monkeypatch.setattr(mixin, "first_head", lambda heads: 0)
    # No kernel runs here.
    monkeypatch.setattr(extension, "obstacle", lambda: None)
    found = EvictingWorker.__new__(EvictingWorker)
    config = build(dtype="bfloat16", block_size=BLOCK, max_model_len=512, max_num_seqs=4)
    for name in "model cache parallel scheduler compilation".split():
        setattr(found, f"{name}_config", getattr(config, f"{name}_config"))
    found.vllm_config, found.device, found.use_v2_model_runner = config, DEVICE, False
    options = dict(probe_window="auto")
    found.eviction_config = EvictionConfig(
        policy="ada-probe", budget=96, profile=profile, options=options
    )
    found.compilation_config.static_forward_context = {name: layer() for name in NAMES}
    found._rings = found._workspace = found.kv_eviction = None
    full = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    rules = found.eviction_config.layer_rules(BLOCK, LAYERS)
    spec = EvictableAttentionSpec.from_spec(full, rules[0])
    found._evictable_layers, found._evictable_specs = NAMES, [spec] * LAYERS
    found._depths = {name: depth for depth, name in enumerate(NAMES)}
    builder = SimpleNamespace(binding=None, kv_cache_spec=spec)
    found.model_runner = SimpleNamespace(
        get_model=lambda: None,
        attn_groups=[[SimpleNamespace(metadata_builders=[builder], layer_names=NAMES)]],
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)]
    found.initialize_from_config(SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS))
    return found


def test_what_sleep_mode_frees_is_in_its_pools(started, pool):
    """Probes are read from a file, so vLLM preserves them; all else is written again."""
    scratch, buffers, eviction = started._scratch, started._buffers, started.kv_eviction
    probes = [*tensors_of(eviction._probes, but=(LayerCache, TokenStats))]
    probes += tensors_of([g.probes for g in eviction._fused._groups.values()])
    (state,) = eviction.states.values()
    again = [started._rings, state, eviction.token_stats, scratch, buffers]
    written = [one for one in tensors_of(again) if one.device == DEVICE and one.numel()]
    weights = [one for one in probes if one.device == DEVICE and one.numel()]
    assert len(weights) > 4 * LAYERS and len(written) > 12
    assert {pool.tag(one) for one in weights} == {"runtime"}
    assert {pool.tag(one) for one in written} == {"kv_cache"}
    assert pool.tag(started._layer(NAMES[0]).kv_cache) is None, "it was made before"
