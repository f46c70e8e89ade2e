"""Servers that the fault tests share, one with ample KV memory and one with hardly any."""

from collections.abc import Iterator

import pytest

from benchmarks.server import Server
from tests.e2e.faults.storm import POLICIES

BASE = [
    "--enforce-eager", "--dtype", "float32", "--block-size", "32", "--served-model-name", "tiny",
    "--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--enable-prefix-caching",
]  # fmt: skip
EVICTION = [
    "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "96", "--kv-eviction-interval", "32",
    "--kv-eviction-allow", ",".join(POLICIES), "--kv-eviction-shared-blocks", "evict",
]  # fmt: skip
BLOCK_BYTES = 4 * 2 * 32 * 2 * 32 * 4
"""Of the tiny model: layers, KV heads, tokens, K and V, head size, bytes."""
RETURNS_MEMORY = dict(
    ONEDNN_PRIMITIVE_CACHE_CAPACITY="1", MALLOC_ARENA_MAX="2",
    MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="131072",
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE="1",
)  # fmt: skip
"""Without these stock vLLM's CPU worker grows by 300 MB over 1200 requests of mixed lengths: oneDNN
keeps a kernel for every number of tokens, and glibc keeps what tensors of all sizes gave back. The
last one closes idle connections early, which hold memory, too."""
PATIENCE_S = 1200
"""Longest wait for a server; a machine that is busy with other things takes minutes."""
SMALL_BLOCKS, SMALL_LEN = 46, 1024
AMPLE_BLOCKS, AMPLE_LEN = 1024, 2048


def arguments(blocks: int, longest: int) -> list[str]:
    """``vllm serve`` with a pool of ``blocks`` and sequences of up to ``longest`` tokens."""
    memory = ["--kv-cache-memory-bytes", str(blocks * BLOCK_BYTES)]
    return [*BASE, *memory, "--max-model-len", str(longest)]


@pytest.fixture(scope="package")
def small_pool(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("small") / "log"
    # Aborts by request id come through an endpoint of this switch.
    extra = [*EVICTION, "--enable-scale-out"]
    args = arguments(SMALL_BLOCKS, SMALL_LEN) + extra
    with Server(tiny_model, args, log, PATIENCE_S, RETURNS_MEMORY) as server:
        yield server


@pytest.fixture(scope="package")
def ample(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ample") / "log"
    args = arguments(AMPLE_BLOCKS, AMPLE_LEN) + EVICTION
    with Server(tiny_model, args, log, PATIENCE_S) as server:
        yield server
