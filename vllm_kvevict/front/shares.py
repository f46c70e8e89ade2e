"""Whose shares a file of ``--kv-eviction-layers`` holds, and the files that ship."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_kvevict
from vllm_kvevict.settings.memory import evictable_layers
from vllm_kvevict.settings.shares import LayerShares, ModelIdentity, parse

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO = "auto"
"""Names the shipped file of the model that is served."""

SHIPPED = Path(vllm_kvevict.__file__).parent / "calibrate" / "shipped"

SHAPE = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim layer_types tie_word_embeddings"
).split()
"""Fields of a model's configuration that tell models apart whatever they are served with."""


def identity(vllm_config: "VllmConfig") -> ModelIdentity:
    """The identity of the model that vLLM serves."""
    model = vllm_config.model_config
    shape = {name: getattr(model.hf_text_config, name, None) for name in SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return ModelIdentity(
        architecture=str(model.architecture),
        layers=evictable_layers(vllm_config),
        kv_heads=model.get_total_num_kv_heads(),
        config=digest[:16],
    )


def load(where: "str | LayerShares", vllm_config: "VllmConfig") -> LayerShares:
    """The shares for the model that vLLM serves.

    Args:
        where: A file, "auto" for a shipped one, or shares that were read before.
        vllm_config: As vLLM built it.

    Raises:
        ValueError: In one sentence: no file, not one of this kind, or of another model.

    """
    mine = identity(vllm_config)
    if where == AUTO:
        return _shipped(mine, vllm_config.model_config.model)
    shares = where if isinstance(where, LayerShares) else read(Path(where))
    if shares.model != mine:
        raise ValueError(
            f"KV eviction: --kv-eviction-layers: the shares are those of {shares.model}, and this "
            f"model is {mine}; measure them with python -m vllm_kvevict.calibrate"
        )
    return shares


def read(path: Path) -> LayerShares:
    """Read a file of shares.

    Raises:
        ValueError: In one sentence, what is wrong with it.

    """
    try:
        return parse(json.loads(path.expanduser().read_text(encoding="utf-8")))
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(f"KV eviction: --kv-eviction-layers: {path}: {problem}")


def _shipped(mine: ModelIdentity, model: str) -> LayerShares:
    for path in sorted(SHIPPED.glob("*.json")):
        shares = read(path)
        if shares.model == mine:
            return shares
    raise ValueError(
        f"KV eviction: --kv-eviction-layers auto: no file of shares ships for {mine}; measure "
        f"them with python -m vllm_kvevict.calibrate {model} and give the file"
    )
