"""Host memory of this machine, which stores outside the KV cache may take."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from psutil import virtual_memory  # type: ignore[import-untyped]

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.store_tiers import parse_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
"""Files with the limit of a container, in the second and the first version of control groups."""


def host_memory() -> int:
    """Return the bytes of main memory that this machine or its container has."""
    found = [virtual_memory().total]
    for path in LIMITS:
        with suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


def check_store_memory(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Refuse more memory for stores than there is, which would end the server hours later.

    Raises:
        ValueError: In one sentence, what to do.

    """
    asked = parse_size(config.store_memory)
    if not asked:
        return
    has = host_memory() * vllm_config.parallel_config.nnodes
    if asked > has:
        raise ValueError(
            f"KV eviction: --kv-eviction-store-memory {config.store_memory} is more than the "
            f"{has / 2**30:.1f} GiB of main memory that there is; give what is free beside the "
            "model, or 0."
        )
