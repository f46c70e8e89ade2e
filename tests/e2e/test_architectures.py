"""Other models than the tiny Llama, token-exact: head counts and sizes, sliding windows."""

import pytest

from tests.e2e.architectures import CONFIGS, MaskedArchitecture, architecture
from tests.e2e.test_hybrids import FAMILIES, HEADS_APART, IN_BFLOAT16, NEAR
from tests.models import cached_tiny_llama, random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Life, check_tokens

EVICTION = dict(policy="ada-snapkv", budget=128, interval=64)
PROMPTS = [random_prompt(n, seed=n) for n in (600, 333, 60)]
NEW_TOKENS = 160


def assert_exact(oracle, run) -> None:
    before = run.counters.evictions
    outputs = run.generate(PROMPTS, NEW_TOKENS)
    assert run.counters.evictions - before >= 6
    full = 0
    for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
        agreed, total = check_tokens(oracle, prompt, output, lives)
        assert agreed == total == NEW_TOKENS
        full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
    assert full < 0.9 * len(PROMPTS) * NEW_TOKENS, "full attention would agree as well"


@pytest.mark.parametrize(
    "shape",
    [
        nightly(dict(heads=4, kv_heads=4, head_dim=64)),
        nightly(dict(heads=4, kv_heads=1, head_dim=64)),
        nightly(dict(heads=6, kv_heads=2, head_dim=128, hidden=192)),
    ],
    ids=["MHA", "MQA", "three-queries-a-head"],
)
def test_llama_shapes(shape):
    path = cached_tiny_llama(**shape)
    with engine(path, EVICTION) as run:
        free = run.free_blocks()
        assert_exact(MaskedArchitecture(path), run)
        assert run.free_blocks() == free


EVERY_NIGHT = sorted(
    CONFIGS.keys()
    - {"Qwen2", "Gemma2", "Gemma3Text", "GptOss", "MiniMaxM2"}
    - {*FAMILIES, *HEADS_APART, *NEAR, *IN_BFLOAT16}
)


@pytest.mark.parametrize("name", [*map(nightly, ["Qwen2", *EVERY_NIGHT])])
def test_every_architecture(name, tmp_path):
    path = architecture(name, tmp_path)
    with engine(path, EVICTION) as run:
        free = run.free_blocks()
        assert_exact(MaskedArchitecture(path), run)
        assert run.free_blocks() == free


@pytest.mark.parametrize(
    ("name", "caching"),
    [
        nightly("Gemma2", True),
        ("Gemma3Text", False),
        nightly("Gemma2", False),
        nightly("Gemma3Text", True),
    ],
)
def test_sliding_window_layers_are_left_alone(name, caching, tmp_path):
    path = architecture(name, tmp_path)
    with engine(path, EVICTION, enable_prefix_caching=caching) as run:
        layers = [n for state in run.worker.kv_eviction.states.values() for n in state.layer_names]
        assert [int(layer.split(".")[2]) for layer in layers] == [1, 3]
        free = run.free_blocks()
        oracle = MaskedArchitecture(path)
        assert_exact(oracle, run)
        if caching:
            assert_exact(oracle, run)
            assert run.counters.prefix_hits_capped > 0
        assert run.free_blocks() == free


def test_attention_sinks(tmp_path):
    path = architecture("GptOss", tmp_path)
    with engine(path, EVICTION) as run:
        caches = [run.worker.kv_eviction.cache(f"model.layers.{i}.attn.attn") for i in (1, 3)]
        assert all(cache.sinks.std() > 0.5 for cache in caches)
        assert_exact(MaskedArchitecture(path), run)


@pytest.mark.nightly
def test_experts_chosen_by_sigmoid(tmp_path, monkeypatch):
    """vLLM 0.32's CPU build chooses so among groups of experts only: here there is one group."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    route = CPURouter._compute_routing

    def in_one_group(self, *args, **kwargs):
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return route(self, *args, **kwargs)

    monkeypatch.setattr(CPURouter, "_compute_routing", in_one_group)
    path = architecture("MiniMaxM2", tmp_path)
    with engine(path, EVICTION) as run:
        assert_exact(MaskedArchitecture(path), run)
