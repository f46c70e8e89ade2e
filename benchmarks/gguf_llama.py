"""A Llama in a GGUF file, written as the folder that `vllm serve` and transformers read.

transformers reads GGUF itself, but only beside `accelerate`, and cannot save what it read.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def name_of(tensor: str) -> str:
    """The parameter of ``LlamaForCausalLM`` that a tensor of the file holds.

    Raises:
        KeyError: A Llama has no such tensor.

    """
    *block, part, _ = tensor.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{NAMES[part]}.weight"


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] of a query or key projection as transformers' rotary embedding pairs.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; transformers rotates (0, D / 2), ...
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def parameters(path: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All tensors of the file by parameter name, dequantised to bfloat16."""
    found = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for tensor in gguf.GGUFReader(path).tensors:
        name, weight = name_of(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type)
        projection = name.split(".")[-2]
        if projection in heads:
            weight = halves(weight, heads[projection])
        found[name] = torch.from_numpy(np.array(weight, np.float32)).bfloat16()
    return found


def convert(source: Path, folder: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and chat template into ``folder``.

    Args:
        source: A GGUF file of the architecture ``llama`` with tied embeddings.
        folder: An existing folder.

    """
    read = AutoConfig.from_pretrained(source.parent, gguf_file=source.name).to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        read.pop(key, None)
    config = LlamaConfig(**read | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    found = parameters(source, config)
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    model.load_state_dict(found, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
