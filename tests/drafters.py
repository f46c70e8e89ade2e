"""Checkpoints that draft for a one-layer Llama."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny_llama


def one_layer(path: Path) -> Path:
    """A Llama of one layer whose normalised embeddings are the embeddings.

    EAGLE's layer has no norm before its attention; so it is this model's.
    """
    tiny_llama(path, layers=1)
    weights = load_file(path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    table /= table.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def eagle(path: Path, target: Path) -> Path:
    """An EAGLE head with the target's layer that reads embeddings, not the target's states.

    From tokens 1 to n it makes what the target does, so it drafts what the target answers where
    little depends on token 0.
    """
    weights = _of(target)
    size = weights["embed_tokens.weight"].shape[1]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    del weights["layers.0.input_layernorm.weight"], weights["norm.weight"]
    return _write(path, target, weights, architectures=["LlamaForCausalLM"])


def eagle3(path: Path, target: Path) -> Path:
    """An EAGLE-3 head whose queries, keys and values read embeddings alone."""
    weights = _of(target)
    size = weights["embed_tokens.weight"].shape[1]
    weights["fc.weight"] = torch.eye(size)
    weights["layers.0.hidden_norm.weight"] = torch.ones(size)
    for name in ("q_proj", "k_proj", "v_proj"):
        whole = weights[f"layers.0.self_attn.{name}.weight"]
        weights[f"layers.0.self_attn.{name}.weight"] = torch.cat(
            [whole, torch.zeros_like(whole)], dim=1
        )
    return _write(
        path,
        target,
        weights,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=1024,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0]},
    )


def _of(target: Path) -> dict[str, torch.Tensor]:
    weights = load_file(target / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _write(path: Path, target: Path, weights: dict[str, torch.Tensor], **changes) -> Path:
    path.mkdir()
    config = json.loads((target / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
