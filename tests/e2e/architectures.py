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
HYBRID: dict[str, Any] = dict(
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=64,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2": dict(num_attention_heads=4, num_key_value_heads=2),
    "Qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    "Gemma2": dict(
        **HYBRID, query_pre_attn_scalar=32, attn_logit_softcapping=4.0, tie_word_embeddings=True
    ),
    "Gemma3Text": dict(**HYBRID, query_pre_attn_scalar=32),
    "GptOss": dict(
        **HYBRID,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=2.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=2048,
        ),
    ),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


def architecture(name: str, path: Path) -> Path:
    """Write a float32 checkpoint with weights that make attention far from uniform."""
    import transformers

    llama = cached_tiny_llama(kv_heads=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    config = getattr(transformers, f"{name}Config")(
        **SHAPE | CONFIGS[name],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
        spread_weights(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def spread_weights(model: Any) -> None:
    """Random weights under which greedy decoding depends on the whole context."""
    scale = {"q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.5, "o_proj": 1.5, "lm_head": 2.0}
    gemma = "Gemma" in type(model).__name__
    for name, weight in model.named_parameters():
        layer = name.split(".")[-2]
        if weight.dim() == 1:
            if name.endswith("sinks"):
                # As heavy as dozens of tokens.
                weight.normal_(mean=4.0)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.fill_(0.0 if gemma else 1.0)
        elif layer == "embed_tokens":
            # Small where it is the output matrix too, so that a token does not repeat itself.
            weight.normal_(std=0.25 * weight.shape[1] ** -0.5 if gemma else 1.0)
        else:
            weight.normal_(std=scale.get(layer, 1.0) * weight.shape[1] ** -0.5)


class MaskedArchitecture(MaskedModel):
    """The oracle for any causal model of transformers; sliding-window layers keep their mask.

    Kept positions are numbered by full-attention layer.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self.model.config
        self.heads = config.num_attention_heads
        self.group = self.heads // config.num_key_value_heads
        self._masks: list[torch.Tensor] = []
        types = getattr(config, "layer_types", None) or ["full_attention"] * 99
        self._full = [i for i in range(config.num_hidden_layers) if types[i] == "full_attention"]
        for index, layer in enumerate(self._full):
            attention = self.model.model.layers[layer].self_attn
            attention.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @property
    def _layers(self) -> int:
        return len(self._full)


def log_probabilities(model: MaskedModel, prompt: list[int], output: list[int], life: Life):
    """[len(output), vocab] log-softmax that chose each token of ``output``."""
    return model.predictions([*prompt, *output][:-1], life).log_softmax(-1)
