"""Names of vLLM's KV connectors, and those that a server has."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

MULTI = "MultiConnector"
"""vLLM's connector that contains others: the first that finds tokens loads them, and all save."""

DUMMY = "DecodeBenchConnector"
"""vLLM's connector for load tests of decode servers, which fills prompts with dummy values."""

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that move the blocks of a prompt from the server that computed it to the one that
answers."""

EXAMPLE = "ExampleConnector"
"""vLLM's connector that saves and loads prompts in files, by their tokens; for tests."""

LMCACHE = "LMCacheConnectorV1"
"""LMCache's connector, which saves and loads chunks of prompts, by their tokens."""

SAVING = (EXAMPLE, LMCACHE)
"""Connectors that save what requests compute, by their tokens."""

ONE_GROUP = (*NIXL, *SAVING)
"""Connectors that need one KV-cache group with all layers."""

LOADING = (DUMMY, *NIXL, *SAVING)
"""Connectors that load the KV of whole prompts."""


def connector_names(transfer: "KVTransferConfig | None") -> tuple[str | None, ...]:
    """Return the names of a server's connectors: those in its ``MultiConnector``, or its only one.

    Args:
        transfer: ``--kv-transfer-config``; None if the server has no connector.

    """
    if transfer is None:
        return ()
    if transfer.kv_connector != MULTI:
        return (transfer.kv_connector,)
    return tuple(one.get("kv_connector") for one in contained(transfer))


def contained(transfer: "KVTransferConfig") -> list[dict[str, Any]]:
    """Return the settings of the connectors in a ``MultiConnector``."""
    return list(transfer.kv_connector_extra_config.get("connectors") or ())


def connectors_of(connector: Any) -> list[Any]:
    """Return the connectors of a scheduler or worker, in the order of :func:`connector_names`.

    Args:
        connector: vLLM's connector; None if there is none.

    """
    if connector is None:
        return []
    return list(getattr(connector, "sub_connectors", None) or [connector])
