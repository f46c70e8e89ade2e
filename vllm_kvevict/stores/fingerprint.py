"""The fingerprint of a server: the values that must be equal for two servers to share store
files."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.store_tiers import parse_folder
from vllm_kvevict.stores.files import StoreFiles

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kv_eviction.tiers")

FORMAT = 2
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number of samples of a file of weights, and bytes of each sample."""

KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""File name suffixes of weights."""

IRRELEVANT = frozenset(
    {
        "store_memory",
        "store_path",
        "allow",
        "max_budget",
        "when",
        "interval",
        "attention",
        "measure_seconds",
        "protect_system",
    }
)
"""Settings that a store does not depend on, or that are part of its key."""


def fingerprint(
    vllm_config: "VllmConfig", cache: "KVCacheConfig", config: EvictionConfig
) -> dict[str, Any]:
    """Return everything that a store depends on in addition to its key, by name.

    The order of tokens inside a block is not included, because files hold tokens in sequence order.
    """
    model = vllm_config.model_config
    settings = config.model_dump(mode="json", exclude=set(IRRELEVANT))
    probe = (settings.get("profile") or {}).get("probe")
    if probe:
        # Replicas may have the file at a different path.
        del probe["file"]
    architecture = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        architecture.pop(name, None)
    return {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "architecture": architecture,
        "weights": weights(model.model, model.revision),
        "load": [vllm_config.load_config.load_format, model.quantization, model.seed],
        "dtype": str(model.dtype),
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "ranks": vllm_config.parallel_config.world_size,
        "groups": [
            [group.layer_names, group.kv_cache_spec.block_size, str(group.kv_cache_spec.dtype)]
            for group in cache.kv_cache_groups
        ],
        "settings": settings,
    }


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
    vllm_config: "VllmConfig", cache: "KVCacheConfig", config: EvictionConfig
) -> StoreFiles | None:
    """Return the files in the folder of ``--kv-eviction-store-path``; None without the flag.

    Raises:
        ValueError: The folder cannot be trusted or created; the message is one sentence.

    """
    if config.store_path is None:
        return None
    folder, max_bytes = parse_folder(config.store_path)
    return StoreFiles(Path(folder), fingerprint(vllm_config, cache, config), max_bytes)
