"""Adds a bias to the keys of a Llama checkpoint, as Qwen2 and Qwen2.5 have it.

    python -m benchmarks.key_bias FOLDER TARGET --norm 100

The bias lies in the pairs of dimensions that the rotary embedding turns most slowly, where it
changes logits of all tokens nearly alike, so that answers with a full cache change little. Without
centres (``worker/centres.py``), stores in few bits have to represent it in every key.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_key_bias(
    source: Path, target: Path, norm: float, pairs: int = 2, fast: bool = False, seed: int = 0
) -> Path:
    """Write a checkpoint with biases of queries, keys, values and outputs, 0 but for keys.

    Args:
        source: Folder of a Llama checkpoint without biases, in safetensors.
        target: Folder to create.
        norm: Norm of the bias of each head.
        pairs: Pairs of dimensions with a bias.
        fast: Whether they are those that turn fastest.
        seed: Seed of its direction.

    Returns:
        ``target``.

    """
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    generator = torch.Generator().manual_seed(seed)
    first = 0 if fast else size // 2 - pairs
    dims = torch.arange(first, first + pairs)
    dims = torch.cat([dims, dims + size // 2])
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        dtype = weights[f"{name}.k_proj.weight"].dtype
        bias = torch.zeros(kv_heads, size)
        bias[:, dims] = torch.randn(kv_heads, len(dims), generator=generator)
        bias *= norm / bias.norm(dim=-1, keepdim=True)
        weights[f"{name}.k_proj.bias"] = bias.flatten().to(dtype)
        for other, width in (
            ("q_proj", heads * size),
            ("v_proj", kv_heads * size),
            ("o_proj", config["hidden_size"]),
        ):
            weights[f"{name}.{other}.bias"] = torch.zeros(width, dtype=dtype)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    (target / "config.json").write_text(json.dumps(config | {"attention_bias": True}, indent=2))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="folder of a Llama checkpoint")
    parser.add_argument("target", type=Path, help="folder to create")
    parser.add_argument("--norm", type=float, default=100.0, help="norm of each head's bias")
    options = parser.parse_args()
    print(add_key_bias(options.source, options.target, options.norm))
