"""Tiny random-weight models of other architectures than Llama, and their token oracle."""

from pathlib import Path
from typing import Any

import torch

from tests.models import cached_tiny_llama
from tests.oracles.masked import Life, MaskedModel

SHAPE: dict[str, Any] = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
GQA: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2)
HEADS: dict[str, Any] = dict(**GQA, head_dim=32)
SLIDING: dict[str, Any] = dict(
    sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2
)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=128)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=64, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=64
)
"""States are small in all hybrids here, so that vLLM's blocks stay small."""
LINEAR: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
YARN: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=150000.0,
    factor=2.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=2048,
)
LATENT: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=2,
    rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, truncate=True),
)
"""An entry of 512 + 64 numbers is the only one that vLLM's CPU kernel reads. Without YaRN vLLM 0.32
turns (RoPE) only the first head of queries on a CPU."""
CONFIGS: dict[str, dict[str, Any]] = {
    "Apertus": GQA,
    "Arcee": HEADS,
    "Cohere2": dict(**GQA, **SLIDING, tie_word_embeddings=True, logit_scale=1.0),
    "DeepseekV2": dict(**LATENT, q_lora_rank=None, topk_method="greedy"),
    "DeepseekV3": dict(**LATENT, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid"),
    "Dots1": dict(**HEADS, **EXPERTS, n_routed_experts=4, n_shared_experts=1, sliding_window=None),
    "Ernie4_5": HEADS,
    "Ernie4_5_Moe": dict(
        **GQA, moe_num_experts=4, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=1
    ),
    "Exaone4": dict(**HEADS, **SLIDING),
    "ExaoneMoe": dict(**HEADS, **SLIDING, **EXPERTS, num_experts=4),
    "FalconH1": dict(**HEADS, **MAMBA, mamba_d_ssm=512),
    "Gemma2": dict(
        **HEADS,
        **SLIDING,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=4.0,
        tie_word_embeddings=True,
    ),
    "Gemma3Text": dict(**HEADS, **SLIDING, query_pre_attn_scalar=32),
    "Gemma4Text": dict(
        **HEADS,
        **SLIDING,
        global_head_dim=64,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=True,
    ),
    "Gemma4E2B": dict(
        **HEADS,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        global_head_dim=32,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=1024,
        tie_word_embeddings=True,
    ),
    "Gemma3nText": dict(
        **HEADS,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=1024,
        tie_word_embeddings=True,
    ),
    "Glm4": HEADS,
    "Glm4Moe": dict(**HEADS, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1),
    "GptOss": dict(
        **HEADS, **SLIDING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN
    ),
    "Granite": dict(**GQA, attention_multiplier=32**-0.5),
    "GraniteMoeHybrid": dict(
        **GQA,
        **MAMBA,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=512,
        attention_multiplier=32**-0.5,
        position_embedding_type="rope",
    ),
    "HunYuanDenseV1": HEADS,
    "Lfm2": dict(
        **GQA,
        layer_types=["conv", "full_attention"] * 2,
        conv_dim=256,
        block_dim=256,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "Llama4Text": dict(
        **HEADS,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=512,
        attention_chunk_size=64,
        layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0, 1, 0],
    ),
    "MiniMaxM2": dict(
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=16,
        scoring_func="sigmoid",
        use_routing_bias=True,
    ),
    "Ministral3": HEADS,
    "Mistral": dict(**HEADS, sliding_window=None),
    "Mixtral": dict(**GQA, num_local_experts=4),
    "Nemotron": HEADS,
    "NemotronH": dict(
        **HEADS,
        layers_block_type=["linear_attention", "full_attention", "mlp"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=64,
    ),
    "Olmo2": GQA,
    "Olmo3": dict(**GQA, **SLIDING),
    "Phi3": GQA,
    "Qwen2": dict(num_attention_heads=4, num_key_value_heads=2),
    "Qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    "Qwen3Moe": dict(**HEADS, **EXPERTS, num_experts=4),
    "Qwen3Next": dict(
        **HEADS, **EXPERTS, **LINEAR, num_experts=4, shared_expert_intermediate_size=128
    ),
    "SeedOss": HEADS,
    "SmolLM3": GQA,
}
SAME = {"Gemma4E2B": "Gemma4Text"}
"""The same classes of transformers under another configuration."""
CLASSES = {
    name: name.removesuffix("Text") + "ForCausalLM" for name in CONFIGS if name.endswith("Text")
}
FULL_ATTENTION = ("full_attention", "attention", "hybrid")


def architecture(name: str, path: Path, **changes: Any) -> Path:
    """Write a float32 checkpoint with weights that make attention far from uniform."""
    import transformers

    llama = cached_tiny_llama(kv_heads=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    family = SAME.get(name, name)
    config = getattr(transformers, f"{family}Config")(
        **SHAPE | CONFIGS[name] | changes,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
        spread_weights(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def spread_weights(model: Any) -> None:
    """Random weights under which greedy decoding depends on the whole context."""
    scale = {"q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.5, "o_proj": 1.5, "lm_head": 2.0}
    for name, weight in model.named_parameters():
        layer = name.split(".")[-2]
        if name.endswith("sinks"):
            # As heavy as dozens of tokens.
            weight.normal_(mean=4.0)
        elif weight.dim() == 1:
            # Norms and the parameters of recurrences stay as they start.
            if name.endswith(".bias"):
                weight.normal_(std=0.3)
        elif layer == "embed_tokens":
            # Small where it is the output matrix too, so that a token does not repeat itself, and
            # where the model multiplies it by the root of its width.
            small = (
                model.config.get_text_config().tie_word_embeddings
                or "Gemma" in type(model).__name__
            )
            weight.normal_(std=0.25 * weight.shape[1] ** -0.5 if small else 1.0)
        else:
            weight.normal_(std=scale.get(layer, 1.0) * weight[0].numel() ** -0.5)


class MaskedArchitecture(MaskedModel):
    """The oracle for any causal model of transformers; sliding-window layers keep their mask.

    Kept positions are numbered by full-attention layer with a cache of its own; a layer that
    reads another's cache sees what that one does.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        config = AutoConfig.from_pretrained(path)
        if config.model_type == "cohere2":
            # What it was trained with, and vLLM does: a token sees that many before itself.
            config.sliding_window += 1
        # vLLM's Transformers backend decorates classes of transformers, which then ask for one.
        eager = EngineArgs(str(path), enforce_eager=True).create_engine_config()
        with set_current_vllm_config(eager):
            self.model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.heads = config.num_attention_heads
        latent = hasattr(config, "kv_lora_rank")
        self.group = self.heads // (1 if latent else config.num_key_value_heads)
        self._masks: list[torch.Tensor] = []
        types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        full = [
            layer
            for layer in range(config.num_hidden_layers)
            if not types or types[layer] in FULL_ATTENTION
        ]
        own = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
        self._full = [layer for layer in full if layer < own]
        assert self._full
        for layer in full:
            # Layers without a cache read that of the last one that has it.
            index = self._full.index(layer) if layer < own else -1
            block = self.model.model.layers[layer]
            attention = block.self_attn if hasattr(block, "self_attn") else block.mixer
            attention.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @property
    def _layers(self) -> int:
        return len(self._full)

    @torch.inference_mode()
    def predictions(self, tokens: list[int], life: Life) -> torch.Tensor:
        """All tokens in one pass: recurrent layers of transformers take no second piece."""
        n = len(tokens)
        self._masks = [self._mask(index, 0, n, life) for index in range(self._layers)]
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        self._masks = []
        return logits[life.prefill_end - 1 :]


def log_probabilities(model: MaskedModel, prompt: list[int], output: list[int], life: Life):
    """[len(output), vocab] log-softmax that chose each token of ``output``."""
    return model.predictions([*prompt, *output][:-1], life).log_softmax(-1)
