"""Configurations that vLLM itself builds for real architectures, and what their refusals say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
)
MIXED = dict(head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"])
LATENT = dict(
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    first_k_dense_replace=2,
    moe_intermediate_size=32,
)
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(COMMON, model_type="llama"),
    "Gemma3ForCausalLM": dict(COMMON, model_type="gemma3_text", **MIXED),
    "DeepseekV2ForCausalLM": dict(COMMON, model_type="deepseek_v2", q_lora_rank=None, **LATENT),
    "GlmMoeDsaForCausalLM": dict(
        COMMON,
        model_type="glm_moe_dsa",
        q_lora_rank=16,
        index_topk=32,
        index_head_dim=16,
        index_n_heads=2,
        **LATENT,
    ),
    "MiMoV2FlashForCausalLM": dict(
        COMMON,
        model_type="mimo_v2_flash",
        num_key_value_heads=2,
        head_dim=48,
        v_head_dim=32,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_head_dim=48,
        swa_v_head_dim=32,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 0],
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention"],
        n_routed_experts=4,
        moe_intermediate_size=32,
    ),
    "MambaForCausalLM": dict(
        model_type="mamba", vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=16
    ),
    "JambaForCausalLM": dict(
        COMMON,
        model_type="jamba",
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=16,
        num_experts=1,
    ),
    "MistralForCausalLM": dict(COMMON, model_type="mistral", sliding_window=64),
    "BertModel": dict(COMMON, model_type="bert"),
    "WhisperForConditionalGeneration": dict(
        model_type="whisper",
        vocab_size=128,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=64,
        max_target_positions=64,
    ),
    "BloomForCausalLM": dict(
        model_type="bloom", vocab_size=128, hidden_size=64, n_layer=2, n_head=2, seq_length=256
    ),
    "GptOssForCausalLM": dict(
        COMMON, model_type="gpt_oss", num_local_experts=2, num_experts_per_tok=1, **MIXED
    ),
    "Gemma3nForCausalLM": dict(
        COMMON,
        model_type="gemma3n_text",
        head_dim=32,
        layer_types=["full_attention", "full_attention"],
        num_kv_shared_layers=1,
        intermediate_size=[64, 64],
        activation_sparsity_pattern=[0.0, 0.0],
        vocab_size_per_layer_input=128,
    ),
}

NGRAM = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)

Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """``create_engine_config`` for an architecture of random size, eviction asked for."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # vLLM looks at a model class in a process of its own: 15 s each.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())

    def create(architecture: str = "LlamaForCausalLM", **options: Any) -> Any:
        model = tmp_path / architecture
        model.mkdir(exist_ok=True)
        settings = dict(MODELS[architecture], architectures=[architecture], dtype="float32")
        (model / "config.json").write_text(json.dumps(settings))
        arguments: dict[str, Any] = dict(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            kv_cache_memory_bytes=64 << 20,
            additional_config={"kv_eviction": "ada-snapkv"},
        )
        return EngineArgs(**arguments | options).create_engine_config()

    return create


def refusal(build: Build, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build(*args, **options)
    return str(caught.value)


def assert_sentence(message: str) -> None:
    assert message.startswith("KV eviction does not support ") and message.endswith(".")
    assert "\n" not in message and ". " not in message
    assert ", because " in message and "; " in message
