"""The fingerprint of a server: the values that must be equal for two servers to share store
files."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from vllm_kvevict import __version__
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.config.store_tiers import parse_folder
from vllm_kvevict.stores.files import StoreFiles

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kv_eviction.tiers")

FORMAT = 2
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number of samples of a file of weights, and bytes of each sample."""

KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""File name suffixes of weights."""

INCLUDED = {
    "window": "Its queries score the tokens, and it bounds the tail.",
    "profile": "Probes, and the shares of layers and heads, decide which tokens are kept.",
    "options": "Options of policies decide which tokens are kept.",
    "store_dtype": "Tokens are stored in this type.",
}
"""Settings that a store depends on and that are not part of its key, with the reason."""

EXCLUDED = {
    "policy": "The policy of the request is part of the key.",
    "budget": "The number of blocks is part of the key, and the share where a policy reads it.",
    "interval": "Evictions after the point do not change the store.",
    "prefill_interval": "The point is part of the key, and nothing is evicted before it.",
    "every": "The position, and the key of the store before, are part of the key.",
    "when": "It decides whether a store is made, not what it holds.",
    "calibrate_seconds": "The profile that results is included.",
    "allow": "Only the number of floats per token follows from it, which is included.",
    "max_budget": "It limits requests, whose blocks are part of the key.",
    "protect_system": "Protected tokens are part of the key.",
    "shared_blocks": "It decides whether an eviction runs, not what it keeps.",
    "attention": "Attention over evicted requests begins after the point.",
    "kernels": "CUDA kernels and PyTorch operations compute the same scores up to rounding.",
    "ring_memory": "A store that was chosen without the window it needs is not shared.",
    "store_memory": "It limits memory.",
    "store_path": "It names the folder.",
    "audit": "It measures evictions.",
}
"""Settings that a store does not depend on or that are part of its key, with the reason."""


def fingerprint(
    vllm_config: "VllmConfig", cache: "KVCacheConfig", config: EvictionConfig, floats: int
) -> dict[str, Any]:
    """Return everything that a store depends on in addition to its key, by name.

    The order of tokens inside a block is not included, because files hold tokens in sequence order.

    Args:
        vllm_config: vLLM's configuration.
        cache: The KV-cache groups.
        config: The server's settings.
        floats: Floats per cached token; they depend on all policies that a request may choose.

    """
    model = vllm_config.model_config
    settings = config.model_dump(mode="json", exclude=set(EXCLUDED))
    if isinstance(config.profile, Profile) and config.profile.probe is not None:
        # Replicas may have the file at a different path.
        del settings["profile"]["probe"]["file"]
    architecture = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        architecture.pop(name, None)
    return {
        "format": [FORMAT, config.token_format.name],
        "vllm": vllm.__version__,
        "plugin": __version__,
        "architecture": architecture,
        "long_rope": _long_rope(model),
        "weights": weights(model.model, model.revision),
        "load": [vllm_config.load_config.load_format, model.quantization, model.seed],
        "dtype": str(model.dtype),
        # Two FP8 formats have one element type.
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "ranks": vllm_config.parallel_config.world_size,
        "floats": floats,
        "groups": [
            [group.layer_names, group.kv_cache_spec.block_size, str(group.kv_cache_spec.dtype)]
            for group in cache.kv_cache_groups
        ],
        "settings": settings,
    }


def _long_rope(model: "ModelConfig") -> bool:
    """Return whether keys are rotated by the long factors of LongRoPE.

    vLLM chooses the factors by the maximum length of the server.
    """
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    original = original or rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "longrope" or not original:
        return False
    return bool(model.max_model_len > original)


def weights(model: str, revision: str | None) -> str:
    """Return a digest of a model's weights, over the size and samples of every file.

    Args:
        model: A folder, a file, or a name on the Hugging Face Hub.
        revision: Revision of the Hub's repository.

    Returns:
        The digest; the name and revision if the weights are not on this machine.

    """
    files = local_files(model, revision)
    if files is None:
        logger.warning("KV eviction: files of stores identify the model by its name only.")
        return f"{model} {revision}"
    checksum = sha256()
    for file in files:
        size = file.stat().st_size
        checksum.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for sample in range(SAMPLES):
                opened.seek(size * sample // SAMPLES)
                checksum.update(opened.read(SAMPLE_BYTES))
    return checksum.hexdigest()


def local_files(
    model: str, revision: str | None, download_dir: str | None = None
) -> list[Path] | None:
    """Return a model's files of weights, sorted; None if they are not on this machine.

    Args:
        model: A folder, a file, or a name on the Hugging Face Hub.
        revision: Revision of the Hub's repository.
        download_dir: Folder of downloads from the Hub, if it is not the Hub's own.

    """
    path = Path(model)
    if not path.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            path = Path(
                snapshot_download(
                    model, revision=revision, cache_dir=download_dir, local_files_only=True
                )
            )
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
            return None
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in KINDS)


def store_files(
    vllm_config: "VllmConfig", cache: "KVCacheConfig", config: EvictionConfig, floats: int
) -> StoreFiles | None:
    """Return the files in the folder of ``--kv-eviction-store-path``; None without the flag.

    The arguments are those of :func:`fingerprint`.

    Raises:
        ValueError: The folder cannot be trusted or created; the message is one sentence.

    """
    if config.store_path is None:
        return None
    folder, max_bytes = parse_folder(config.store_path)
    described = fingerprint(vllm_config, cache, config, floats)
    ranks = vllm_config.parallel_config.world_size
    return StoreFiles(Path(folder), described, max_bytes, ranks)
