"""The ways to serve that are compared, and the flags of each."""

import json
from dataclasses import dataclass

from vllm_kvevict.serving.offload import CONNECTOR, OURS

EIGHTH = "12.5%"
AS_AUTO = "as auto"
"""The budget that the server of the way ``auto`` chose."""
OFFLOAD_GIB = 1
"""Host memory of the offload: more than all prompts of the load need."""


@dataclass(frozen=True)
class Way:
    """One way to serve.

    Args:
        key: Its name on the command line and in files.
        title: Its name in the table.
        flags: Flags of ``vllm serve`` other than those of policy and budget.
        policy: Value of ``--kv-eviction``; None if the server does not evict.
        budget: Value of ``--kv-eviction-budget``, or :data:`AS_AUTO`; None for the default.
        build: True if vLLM's build for this machine may lack what the way needs. The table then
            has vLLM's error instead of numbers.
        offloads: True if the server must have copied blocks to host memory.

    """

    key: str
    title: str
    flags: tuple[str, ...] = ()
    policy: str | None = None
    budget: str | None = None
    build: bool = False
    offloads: bool = False

    @property
    def has_fp8_cache(self) -> bool:
        return self.flags[:2] == _FP8

    def server_args(self, profile: str | None, auto_budget: str | None) -> list[str]:
        """Return the flags that distinguish this way.

        Args:
            profile: Value of ``--kv-eviction-profile`` for ``auto``; None for the default.
            auto_budget: The budget that ``auto`` chose, if it has been measured.

        Raises:
            ValueError: The way needs the budget of ``auto``, which is not known.

        """
        flags = list(self.flags)
        if self.policy is None:
            return flags
        flags += ["--kv-eviction", self.policy]
        budget = auto_budget if self.budget == AS_AUTO else self.budget
        if self.budget == AS_AUTO and budget is None:
            raise ValueError(f"{self.key} has the budget of auto: measure auto first")
        if budget is not None:
            flags += ["--kv-eviction-budget", budget]
        if self.policy == "auto" and profile is not None:
            flags += ["--kv-eviction-profile", profile]
        return flags


_FP8 = ("--kv-cache-dtype", "fp8")
_STORES = "--kv-eviction-store-dtype"
_COPIES = {
    "kv_connector": CONNECTOR,
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": OFFLOAD_GIB << 30, **OURS},
}

STOCK = Way("stock", "stock vLLM")
AUTO = Way("auto", "`auto`", policy="auto")
WAYS = (
    STOCK,
    Way("fp8", "FP8 KV cache", _FP8, build=True),
    AUTO,
    Way("auto-12.5", f"`auto`, {EIGHTH}", policy="auto", budget=EIGHTH),
    Way("auto-int8", "`auto`, `int8`", (_STORES, "int8"), policy="auto"),
    Way("auto-12.5-int4", f"`auto`, {EIGHTH}, `int4`", (_STORES, "int4"), policy="auto",
        budget=EIGHTH),
    Way("fp8-auto", "FP8 KV cache and `auto`", _FP8, policy="auto", build=True),
    Way("fp8-auto-int4", "FP8 KV cache and `auto`, `int4`", (*_FP8, _STORES, "int4"), policy="auto",
        build=True),
    Way("streaming-llm", "`streaming-llm`, budget of `auto`", policy="streaming-llm",
        budget=AS_AUTO),
    Way("streaming-llm-12.5", f"`streaming-llm`, {EIGHTH}", policy="streaming-llm", budget=EIGHTH),
    Way("offload", "vLLM's KV offload",
        ("--kv-offloading-size", str(OFFLOAD_GIB), "--kv-offloading-backend", "native"),
        build=True, offloads=True),
    # vLLM has no copies for its CPU platform; the connector and its scheduler are vLLM's here, too.
    Way("offload-copies", "vLLM's KV offload with this package's copies",
        ("--kv-transfer-config", json.dumps(_COPIES)), build=True, offloads=True),
)  # fmt: skip
"""In the order in which they are measured: ``auto`` before the ways that take its budget."""

KVPRESS = "kvpress"
"""Key of kvpress, which answers questions in transformers and does not serve."""
KEYS = (*(way.key for way in WAYS), KVPRESS)
