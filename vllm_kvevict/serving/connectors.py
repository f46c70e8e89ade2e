"""Checks KV connectors (``--kv-transfer-config``, ``--kv-offloading-size``) for use with eviction.

A connector that loads whole prompts makes a decode server: another server computes the prompts,
and this one evicts them in its first step.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from vllm_kvevict.config.connectors import (
    LOADING,
    MULTI,
    NIXL,
    ONE_GROUP,
    SAVING,
    connector_names,
    contained,
)
from vllm_kvevict.config.memory_budget import evictable_layers
from vllm_kvevict.serving.offload import CONNECTOR as OFFLOAD
from vllm_kvevict.serving.offload import serve_offload

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

logger = init_logger("vllm.kv_eviction.connectors")

SERVED = (OFFLOAD, *LOADING, MULTI)


class Beside(NamedTuple):
    """Something that does not work together with a connector that loads prompts.

    ``applies`` returns whether the configuration has ``what``.
    """

    what: str
    why: str
    advice: str
    applies: "Callable[[VllmConfig, EvictionConfig], Any]"

    def sentence(self, connector: str) -> str:
        return (
            f"KV eviction does not support {self.what} together with {connector}, because "
            f"{self.why}; {self.advice}."
        )


def _attention_extension(_: "VllmConfig", config: "EvictionConfig") -> bool:
    from vllm_kvevict.policies.requirements import policy_requirements

    needs = policy_requirements(config).values()
    return any(one.every_query or one.attention for one in needs)


UNTRIED = "this has not been tested"

BESIDE_LOADS = (
    Beside(
        "h2o, ada-h2o and subgen-stream",
        "these policies read what the attention of every token of a prompt stores and this server "
        "does not compute prompts",
        "choose another policy in --kv-eviction and --kv-eviction-allow",
        _attention_extension,
    ),
    Beside(
        "--kv-eviction-prefill-interval",
        "a loaded prompt is not computed in parts",
        "remove the flag",
        lambda _, config: config.prefill_interval,
    ),
    Beside(
        "--kv-eviction-every",
        "a loaded prompt is not computed in parts",
        "remove the flag",
        lambda _, config: config.every,
    ),
    Beside(
        "--kv-eviction-store-memory and --kv-eviction-store-path",
        UNTRIED,
        "remove these flags",
        lambda _, config: config.has_tiers,
    ),
    Beside("--kv-eviction-audit", UNTRIED, "remove the flag", lambda _, config: config.audits),
    Beside(
        "speculative decoding",
        UNTRIED,
        "remove --speculative-config",
        lambda c, _: c.speculative_config is not None,
    ),
    Beside(
        "pipeline parallelism",
        UNTRIED,
        "set --pipeline-parallel-size to 1",
        lambda c, _: c.parallel_config.pipeline_parallel_size > 1,
    ),
    Beside(
        "MLA models",
        UNTRIED,
        "remove --kv-transfer-config or serve without --kv-eviction",
        lambda c, _: c.model_config.use_mla,
    ),
    Beside(
        "models with layers that do not evict",
        "vLLM searches the cache of every group of layers beyond the limit of eviction",
        "remove --kv-transfer-config or serve without --kv-eviction",
        lambda c, _: evictable_layers(c) < c.model_config.get_total_num_hidden_layers(),
    ),
)


def _extra(vllm_config: "VllmConfig", key: str) -> Any:
    return vllm_config.kv_transfer_config.kv_connector_extra_config.get(key)


def _staged(vllm_config: "VllmConfig", _: "EvictionConfig") -> bool:
    from vllm.platforms import current_platform

    buffer = vllm_config.kv_transfer_config.kv_buffer_device
    return not current_platform.is_cpu() and buffer == "cpu"


BESIDE_ONE_GROUP = (
    *BESIDE_LOADS,
    Beside(
        "groups of layers with individual budgets",
        "it serves one group with all layers",
        "set groups in --kv-eviction-options to 1 under --kv-eviction-profile, or choose another "
        "policy than pyramidkv and ada-pyramid",
        lambda _, config: config.has_groups,
    ),
)

BESIDE_SAVED = (
    *BESIDE_ONE_GROUP,
    Beside(
        "kv_load_failure_policy recompute",
        "a prompt evicts in the step that loads it, before a failure is known",
        "set it to fail in --kv-transfer-config",
        lambda c, _: c.kv_transfer_config.kv_load_failure_policy == "recompute",
    ),
)

BESIDE_TRANSFERS = (
    *BESIDE_ONE_GROUP,
    Beside(
        "bidirectional_kv_xfer",
        "a prefill server would read blocks that this server has evicted",
        "remove it from kv_connector_extra_config",
        lambda c, _: _extra(c, "bidirectional_kv_xfer"),
    ),
    Beside(
        "enable_permute_local_kv",
        UNTRIED,
        "remove it from --kv-transfer-config",
        lambda c, _: c.kv_transfer_config.enable_permute_local_kv,
    ),
    Beside(
        "transfers through buffers in host memory",
        UNTRIED,
        "remove kv_buffer_device from --kv-transfer-config",
        _staged,
    ),
)


def with_one_group(vllm_config: "VllmConfig", config: "EvictionConfig") -> "EvictionConfig":
    """Return the settings with one budget for all layers if the connector serves one group only.

    Servers that exchange blocks must have the same groups of layers. The probes of a profile stay
    in use; an explicit number of groups is not changed.
    """
    names = connector_names(vllm_config.kv_transfer_config)
    needing = [name for name in names if name in ONE_GROUP]
    if not needing:
        return config
    if config.profile is None or config.options.groups is not None:
        return config
    logger.info(
        "KV eviction gives all layers one budget, as if the option groups were 1, because "
        "%s serves one group with all layers.",
        needing[0],
    )
    options = config.options.model_copy(update={"groups": 1})
    return config.model_copy(update={"options": options})


def serve_connector(vllm_config: "VllmConfig", config: "EvictionConfig") -> None:
    """Check the KV connector of a server, if it has one.

    Args:
        vllm_config: As vLLM built it. On the CPU platform the settings of vLLM's offload are
            changed in place.
        config: The settings of eviction.

    Raises:
        ValueError: In one sentence, what does not work with eviction.

    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    name = transfer.kv_connector
    if name == MULTI and transfer.kv_connector_module_path is None:
        _serve_both(vllm_config, config)
        return
    if name not in SERVED or transfer.kv_connector_module_path is not None:
        raise ValueError(
            "KV eviction does not support this KV connector, because connectors move blocks that "
            "eviction frees and only some have been adapted; set kv_connector of "
            f"--kv-transfer-config to one of {', '.join(SERVED)} without "
            "kv_connector_module_path, or set --kv-offloading-size alone, or serve without "
            "--kv-eviction."
        )
    if name == OFFLOAD:
        serve_offload(vllm_config)
        return
    beside = BESIDE_TRANSFERS if name in NIXL else BESIDE_SAVED if name in SAVING else BESIDE_LOADS
    for one in beside:
        if one.applies(vllm_config, config):
            raise ValueError(one.sentence(name))


def _serve_both(vllm_config: "VllmConfig", config: "EvictionConfig") -> None:
    """Check the connectors in a ``MultiConnector``: NIXL, and vLLM's offload after it.

    Raises:
        ValueError: In one sentence, what does not work with eviction.

    """
    from vllm.config import KVTransferConfig

    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    names = connector_names(transfer)
    if len(names) != 2 or names[0] not in NIXL or names[1] != OFFLOAD:
        raise ValueError(
            f"KV eviction does not support these connectors in {MULTI}, because only one "
            "combination has been tested; set connectors of kv_connector_extra_config in "
            f"--kv-transfer-config to one of {', '.join(NIXL)}, followed by {OFFLOAD}."
        )
    if not vllm_config.scheduler_config.scheduler_reserve_full_isl:
        raise ValueError(
            f"KV eviction does not support --no-scheduler-reserve-full-isl together with {MULTI}, "
            "because partly loaded requests could wait for each other forever; remove the flag."
        )
    for one in contained(transfer):
        alone = copy.copy(vllm_config)
        alone.kv_transfer_config = KVTransferConfig(**one)
        serve_connector(alone, config)
        # The offload gets other copies on a CPU.
        one["kv_connector_extra_config"] = alone.kv_transfer_config.kv_connector_extra_config
