"""Checkpoints that draft for a Llama of one layer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.tiny_model import cached_tiny_llama, tiny_llama

ZERO = 0
"""A token whose embedding is zero."""

DRAFTS = 3
"""Tokens that are drafted at once."""


def one_layer(path: Path) -> Path:
    """A Llama of one layer whose normalised embeddings are the embeddings.

    EAGLE's layer has no norm before its attention; so it can be this model's.
    """
    tiny_llama(path, layers=1)
    weights = load_file(path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    table /= table.pow(2).mean(-1, keepdim=True).sqrt()
    table[ZERO] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def eagle(path: Path, target: Path) -> Path:
    """An EAGLE head with the target's layer that reads embeddings, not the target's states.

    From tokens 1 to n it makes what the target does, so it drafts what the target answers where
    little depends on token 0.
    """
    weights = _weights(target)
    size = weights["embed_tokens.weight"].shape[1]
    weights["fc.weight"] = torch.eye(size, 2 * size)
    for name in ("layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"):
        del weights[name]
    return _write(path, target, weights)


def eagle3(path: Path, target: Path) -> Path:
    """An EAGLE-3 head whose queries, keys and values read embeddings alone.

    Its first draft is the target's layer without what goes past the attention.
    """
    weights = _weights(target)
    size = weights["embed_tokens.weight"].shape[1]
    weights["fc.weight"] = torch.zeros(size, size)
    weights["layers.0.hidden_norm.weight"] = torch.ones(size)
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"layers.0.self_attn.{name}.weight"
        weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])], dim=1)
    return _write(
        path,
        target,
        weights,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=weights["embed_tokens.weight"].shape[0],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0]},
    )


def mimo(path: Path, target: Path) -> Path:
    """The target as MiMo, with its layer once more as the one that predicts tokens (MTP).

    As :func:`eagle`; at position 0 it reads zeros.
    """
    weights, size = load_file(target / "model.safetensors"), 0
    for name, tensor in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace(".weight", ".bias")] = torch.zeros(len(tensor))
            size = tensor.shape[1]
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):
            weights[name.replace("layers", "mtp_layers")] = tensor.clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(size)
    weights["model.mtp_layers.0.input_proj.weight"] = torch.eye(size, 2 * size).roll(size, 1)
    changes: dict[str, Any] = dict(model_type="qwen2", architectures=["MiMoForCausalLM"])
    return _write(path, target, weights, num_nextn_predict_layers=1, **changes)


def medusa(path: Path, target: Path) -> Path:
    """Medusa heads of random blocks over the target's output matrix; no layer, so no cache."""
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    size, weights = head.shape[1], {}
    for index in range(DRAFTS):
        seeded = torch.Generator().manual_seed(index)
        block = torch.randn(size, size, generator=seeded) * size**-0.5
        weights[f"blocks.{index}.layers.0.weight"] = block
        weights[f"lm_heads.{index}.weight"] = head.clone()
    heads: dict[str, Any] = dict(medusa_num_heads=DRAFTS, medusa_num_layers=1)
    return _write(
        path, target, weights, model_type="medusa", architectures=["MedusaModel"], **heads
    )


DRAFTERS = dict(eagle=eagle, eagle3=eagle3)


def checkpoints(method: str, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """The model as a Llama, what is served, and what drafts for it."""
    speculative: dict[str, Any] = dict(method=method, num_speculative_tokens=DRAFTS)
    if method == "draft_model":
        model = cached_tiny_llama()
        return model, model, speculative | dict(model=str(model))
    model = one_layer(folder / "model")
    if method == "mtp":
        return model, mimo(folder / "mimo", model), speculative
    draft = DRAFTERS[method](folder / "draft", model)
    return model, model, speculative | dict(model=str(draft))


def _weights(target: Path) -> dict[str, torch.Tensor]:
    weights = load_file(target / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _write(path: Path, target: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    path.mkdir()
    for file in target.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
