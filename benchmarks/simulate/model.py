"""The sizes of a model, from its configuration: a built-in one, or any ``config.json``."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    torch_dtype="bfloat16",
    vocab_size=128256,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=128000,
    eos_token_id=128001,
)

MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "llama-3.1-70b": _LLAMA
    | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}
"""What the models' own ``config.json`` say, as far as sizes go."""


def write_config(name: str, folder: Path) -> None:
    """Put the ``config.json`` of a built-in model, or of a path, into ``folder``.

    Raises:
        SystemExit: There is no such model and no such file.

    """
    target, path = folder / "config.json", Path(name).expanduser()
    if name in MODELS:
        target.write_text(json.dumps(MODELS[name]))
        return
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SystemExit(f"--model: {name} is neither a file nor one of {', '.join(MODELS)}")
    shutil.copy(path, target)


@dataclass(frozen=True)
class Sizes:
    """One tensor-parallel rank of a model, for the clock.

    ``weights`` are bytes, ``kv_token`` the bytes of one cached token over all layers;
    ``query_width`` is query heads times head size.
    """

    layers: int
    hidden: int
    query_width: int
    kv_token: int
    weights: int
    itemsize: int
    ranks: int

    @classmethod
    def of(cls, vllm_config: "VllmConfig", weights: int) -> "Sizes":
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        layers, head = model.get_total_num_hidden_layers(), model.get_head_size()
        itemsize = model.dtype.itemsize
        return cls(
            layers=layers,
            hidden=model.get_hidden_size(),
            query_width=model.get_num_attention_heads(parallel) * head,
            kv_token=2 * layers * model.get_num_kv_heads(parallel) * head * itemsize,
            weights=weights,
            itemsize=itemsize,
            ranks=parallel.tensor_parallel_size,
        )
