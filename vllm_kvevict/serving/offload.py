"""Checks vLLM's own offload to host memory (``--kv-offloading-size``) for use with eviction."""

from typing import TYPE_CHECKING, Any

from vllm_kvevict.config.memory_budget import evictable_layers
from vllm_kvevict.serving.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = "OffloadingConnector"
SPEC = "CPUOffloadingSpec"
OURS = {"spec_name": "MainMemorySpec", "spec_module_path": "vllm_kvevict.worker.cpu_offload"}
"""Settings that select our copies on vLLM's CPU platform, for which vLLM has none."""


def _extra(vllm_config: "VllmConfig") -> dict[str, Any]:
    transfer = vllm_config.kv_transfer_config
    return transfer.kv_connector_extra_config if transfer is not None else {}


def _other_memory(vllm_config: "VllmConfig") -> bool:
    names = (SPEC, OURS["spec_name"])
    extra = _extra(vllm_config)
    return extra.get("spec_name", SPEC) not in names or bool(extra.get("canonical_layout"))


def without_prefix_cache(vllm_config: "VllmConfig") -> str:
    """How a sentence goes on that needs the prefix cache, up to the name of what needs it."""
    if vllm_config.model_config.use_mla:
        return ", and vLLM on CPUs has none for MLA models; remove"
    return "; remove --no-enable-prefix-caching or"


REFUSALS = (
    Refusal(
        "vLLM's offload in this role",
        "a server stores blocks and loads them again",
        "set --kv-offloading-size alone, or kv_role of --kv-transfer-config to kv_both",
        lambda c: c.kv_transfer_config.kv_role != "kv_both",
    ),
    Refusal(
        "this kind of KV offloading",
        "only host memory has been tried with it",
        "set --kv-offloading-size instead of --kv-transfer-config",
        _other_memory,
    ),
    Refusal(
        "KV offloading of MLA models",
        "what comes back is found as a prefix is, and vLLM on CPUs has no prefix cache for them",
        "remove --kv-offloading-size",
        lambda c: c.model_config.use_mla,
    ),
    Refusal(
        "KV offloading without prefix caching",
        "what comes back is found as a prefix is",
        "remove --no-enable-prefix-caching or --kv-offloading-size",
        lambda c: not c.cache_config.enable_prefix_caching,
    ),
    Refusal(
        "KV offloading with speculative decoding",
        "it has not been tried with it",
        "remove --speculative-config or --kv-offloading-size",
        lambda c: c.speculative_config is not None,
    ),
    Refusal(
        "KV offloading with pipeline parallelism",
        "it has not been tried with it",
        "set --pipeline-parallel-size to 1 or remove --kv-offloading-size",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
    ),
    Refusal(
        "KV offloading of models with layers that do not evict",
        "it has not been tried with them",
        "remove --kv-offloading-size or serve without --kv-eviction",
        lambda c: evictable_layers(c) < c.model_config.get_total_num_hidden_layers(),
    ),
)


def serve_offload(vllm_config: "VllmConfig") -> None:
    """Check vLLM's offload, which is on, and give it our copies on the CPU platform.

    Raises:
        ValueError: In one sentence, what does not work with eviction.

    """
    from vllm.platforms import current_platform

    for refusal in REFUSALS:
        if refusal.applies(vllm_config):
            raise ValueError(refusal.sentence())
    if current_platform.is_cpu():
        _extra(vllm_config).update(OURS)
