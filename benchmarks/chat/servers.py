"""The servers that are compared: their flags, and the keys of every request to them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.demo import BLOCK, block_bytes
from benchmarks.server import Server
from vllm_kvevict.serving.offload import CONNECTOR, OURS

NO_PROFILE = "none"

PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' or not loop.last and loop.nextitem['role'] == 'user' %}"
    "{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A chat template for base models. An answer continues the line of its question."""

_EVICT = ("--kv-eviction", "{policy}", "--kv-eviction-budget", "{budget}")
_EVERY = (*_EVICT, "--kv-eviction-every", "{every}")
_AT: dict[str, Any] = {"kv_eviction_at": {"message": 0}}
_FILES = ("--kv-eviction-store-path", "{stores}")
_FROM_FILES = ("evictions", "stores_restored_file")
_OFFLOAD = dict(
    kv_connector=CONNECTOR,
    kv_role="kv_both",
    kv_connector_extra_config={"cpu_bytes_to_use": 4 << 30} | OURS,
)
"""What ``--kv-offloading-size 4`` comes to on a CPU under eviction, for stock vLLM."""


@dataclass(frozen=True)
class Row:
    """A server of the table. Names in braces are fields of :class:`Setting`.

    Args:
        title: In table and picture.
        flags: Beside those that all servers have.
        xargs: ``vllm_xargs`` of its requests.
        counters: Must be above 0 at the end, or the row did not measure what it says.
        restarts: The server ends after half of the turns of all chats, and another one starts.

    """

    title: str
    flags: tuple[str, ...] = ()
    xargs: dict[str, Any] = field(default_factory=dict)
    counters: tuple[str, ...] = ()
    restarts: bool = False


STOCK = "stock"

LOADED = "external_hits"
"""Prompt tokens that came from the host memory of vLLM's own offload."""

ROWS = {
    STOCK: Row("stock"),
    "always": Row("always", _EVICT, {}, ("evictions",)),
    "pressure": Row(
        "pressure", (*_EVICT, "--kv-eviction-when", "pressure"), {}, ("evictions",)
    ),
    "at": Row("at the document", _EVICT, _AT, ("evictions", "stores_published")),
    "tiers": Row(
        "tiers", (*_EVICT, "--kv-eviction-store-memory", "{store_memory}"), _AT,
        ("evictions", "stores_restored_memory"),
    ),
    "tiers-files": Row("tiers, from files", (*_EVICT, *_FILES), _AT, _FROM_FILES),
    "restart": Row(
        "tiers, from files, restarted", (*_EVICT, *_FILES), _AT, _FROM_FILES, restarts=True
    ),
    "every": Row("every N tokens", _EVERY, {}, ("evictions", "stores_reused")),
    "every-tiers": Row(
        "every N tokens, tiers", (*_EVERY, "--kv-eviction-store-memory", "{store_memory}"), {},
        ("evictions", "stores_restored_memory"),
    ),
    "every-restart": Row(
        "every N tokens, from files, restarted", (*_EVERY, *_FILES), {}, _FROM_FILES,
        restarts=True,
    ),
    "stock-offload": Row(
        "stock, offload", ("--kv-transfer-config", "{offload}"), {}, (LOADED,)
    ),
    "offload": Row(
        "offload", (*_EVICT, "--kv-offloading-size", "4"), {}, ("evictions", LOADED)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all servers of a run have in common.

    Args:
        model: Folder of the model.
        tokens: Of the longest chat, with all its answers.
        memory: Such chats that the KV cache holds without eviction.
        sequences: Most requests in a batch.
        policy: Of the rows that evict.
        budget: Tokens per KV head, or a share.
        profile: A file, ``auto``, or :data:`NO_PROFILE`.
        store_memory: Host memory for stores, such as ``4G``.
        every: Tokens between evictions, of the rows that evict at fixed positions.
        dtype: Of weights and KV cache.
        work: Folder of the logs.
        chat_template: For models without one; empty for the model's own.
        store_dtype: Type of stored tokens, of the rows that evict.

    """

    model: Path
    tokens: int
    memory: int
    sequences: int
    policy: str
    budget: str
    profile: str
    store_memory: str
    every: int
    dtype: str
    work: Path
    chat_template: str = ""
    store_dtype: str = "auto"

    def _fill(self, text: Any, stores: Path | None = None) -> Any:
        if not isinstance(text, str):
            return text
        return text.format(**vars(self), stores=stores, offload=json.dumps(_OFFLOAD))

    def xargs(self, row: Row) -> dict[str, Any]:
        """``vllm_xargs`` of the row's requests."""
        return {key: self._fill(value) for key, value in row.xargs.items()}

    def flags(self, row: Row, stores: Path) -> list[str]:
        """The row's flags; ``stores`` is the folder of those that keep files."""
        flags = [self._fill(flag, stores) for flag in row.flags]
        if "--kv-eviction" in flags:
            if self.profile != NO_PROFILE:
                flags += ["--kv-eviction-profile", self.profile]
            if self.store_dtype != "auto":
                flags += ["--kv-eviction-store-dtype", self.store_dtype]
        return flags

    def start(self, name: str, stores: Path) -> Server:
        """A server for the row of that name, to be entered."""
        each, block = -(-self.tokens // BLOCK), block_bytes(self.model, self.dtype)
        args = [
            "--dtype", self.dtype, "--enforce-eager", "--block-size", str(BLOCK), "--seed", "0",
            "--max-model-len", str((each + 1) * BLOCK), "--max-num-batched-tokens", "2048",
            "--max-num-seqs", str(self.sequences), "--enable-prefix-caching",
            "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
            # The KV cache must hold a request of the maximum length and vLLM's null block.
            "--kv-cache-memory-bytes", str((max(self.memory * each, each + 1) + 1) * block),
            *self.flags(ROWS[name], stores),
        ]  # fmt: skip
        if self.chat_template:
            args += ["--chat-template", self.chat_template]
        # Where a connector is configured vLLM would leave a core more, or on two cores none.
        env = dict(VLLM_CPU_NUM_OF_RESERVED_CPU="1")
        return Server(self.model, args, self.work / f"{name}.log", env=env)
