"""Identity of the model that vLLM serves, and whether a profile is this model's."""

import hashlib
import json
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvevict.config.memory_budget import evictable_layers
from vllm_kvevict.config.profile import ModelIdentity
from vllm_kvevict.stores.fingerprint import local_files
from vllm_kvevict.stores.samples import SIMILAR, correlation, digest, is_same, sample

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_eviction.profile")

SHAPE = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim layer_types tie_word_embeddings"
).split()
"""Fields of a model's configuration that tell models apart, however they are served."""

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs; 3.14159 != 2.71828e-10.\n\n\tdef f(x): return"
    " {'key': [x ** 2, None]}  # Größe, naïveté, Ελλάδα, Привет, 東京, 안녕, नमस्ते, مرحبا, 🙂"
)
"""Text by whose tokens tokenizers are told apart."""

KINDS = (".safetensors", ".bin", ".pt")
"""Suffixes of files of weights; vLLM loads those with the first that there is."""


class Match(IntEnum):
    """Relation of a profile to a model.

    OTHER: another model's. RELATED: a fine-tune's, a base model's or a quantised model's, or it
    cannot be said. SAME: this model's.
    """

    OTHER = 0
    RELATED = 1
    SAME = 2


def identity(vllm_config: "VllmConfig") -> ModelIdentity:
    """Return the identity of the model that vLLM serves.

    Weights are read from the files on this machine. They are unknown (None) if there are none, or
    if vLLM does not load tensors by name from them.
    """
    model = vllm_config.model_config
    shape = {name: getattr(model.hf_text_config, name, None) for name in SHAPE}
    weights = _weights(vllm_config)
    return ModelIdentity(
        architecture=str(model.architecture),
        layers=evictable_layers(vllm_config),
        kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        config=hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16],
        tokenizer=_tokenizer(model),
        weights=weights,
        name=None if weights else f"{model.model} {model.revision or ''}".strip(),
    )


def match(profile: ModelIdentity, model: ModelIdentity) -> tuple[Match, str]:
    """Return the relation of a profile to a model, and the reason for it in words.

    Args:
        profile: Identity in the profile.
        model: Identity of the model that is served.

    """
    if (profile.architecture, profile.layers, profile.kv_heads, profile.config) != (
        model.architecture,
        model.layers,
        model.kv_heads,
        model.config,
    ):
        return Match.OTHER, "the models have different shapes"
    if profile.name is not None and profile.name == model.name:
        return Match.SAME, "the weights are unknown, and the names are the same"
    if not profile.weights or not model.weights:
        where = "the profile has no sample of weights"
        if profile.weights:
            where = "the model's weights cannot be read on this machine"
        return Match.RELATED, f"{where}, so nothing shows that they are the same"
    similar = correlation(profile.weights, model.weights)
    if similar is None:
        return Match.RELATED, "the weights have other names, so they cannot be compared"
    if similar < SIMILAR:
        return Match.OTHER, f"the weights are different (their correlation is {similar:.2f})"
    if not is_same(profile.weights, model.weights):
        return Match.RELATED, (
            f"the weights are similar (their correlation is {similar:.4f}), but not the same, as "
            "those of a fine-tuned or quantised model"
        )
    if None not in (profile.tokenizer, model.tokenizer) and profile.tokenizer != model.tokenizer:
        return Match.RELATED, "the weights are the same, but the tokenizer is another"
    return Match.SAME, "the weights and the tokenizer are the same"


def file_name(model: ModelIdentity) -> str:
    """Return the name of a model's profile in the cache."""
    known = dict(model.weights or {}) | {"tokenizer": model.tokenizer or ""}
    if model.name is not None:
        known["name"] = model.name
    return f"{model.architecture}-{model.config}-{digest(known)[:16]}.json"


def download(vllm_config: "VllmConfig") -> None:
    """Download the weights of a model of the Hugging Face Hub, as vLLM is about to do.

    A failure is left to vLLM, which reports it when it loads the model.
    """
    from vllm.model_executor.model_loader import get_model_loader

    model, load = vllm_config.model_config, vllm_config.load_config
    if Path(model.model).exists() or load.load_format not in ("auto", "hf", "safetensors", "pt"):
        return
    try:
        get_model_loader(load).download_model(model)
    except Exception as error:
        logger.debug("KV eviction: the weights were not downloaded: %r", error)


def _weights(vllm_config: "VllmConfig") -> dict[str, str] | None:
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return None
    files = local_files(model.model, model.revision, load.download_dir) or []
    try:
        return sample(_loaded(files)) or None
    except (OSError, ValueError, KeyError) as error:
        logger.debug("KV eviction: the weights cannot be sampled: %s", error)
        return None


def _loaded(files: list[Path]) -> list[Path]:
    """Return the files that vLLM loads, of all files of weights in a folder."""
    if len(files) == 1:
        return [file for file in files if file.suffix != ".gguf"]
    top = min((len(file.parts) for file in files), default=0)
    files = [file for file in files if len(file.parts) == top]
    for suffix in KINDS:
        if found := [file for file in files if file.suffix == suffix]:
            # A folder may contain the weights a second time, with Mistral's names.
            return [f for f in found if not f.name.startswith("consolidated")] or found
    return []


def _tokenizer(model: Any) -> str | None:
    """Return a digest of the tokens of :data:`TEXT`, with those that begin and end a prompt."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        tokenizer = cached_tokenizer_from_config(model)
        if tokenizer is None:
            return None
        ids = list(map(int, tokenizer.encode(TEXT)))
    except Exception as error:
        # vLLM reports the fault when it loads the tokenizer.
        logger.debug("KV eviction: the tokenizer cannot be loaded: %r", error)
        return None
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
