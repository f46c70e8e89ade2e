"""Completion of vLLM's offload copies before an eviction overwrites the blocks they read."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_kvevict.config.connectors import connectors_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def settle(jobs: set[int], coming: "SchedulerOutput | None" = None) -> None:
    """Wait until these copies are complete. Copies of the step that has run are started first.

    Args:
        jobs: Job ids of the copies, assigned by the connector's scheduler side. Waiting for a
            complete copy costs nothing.
        coming: The step that is about to run, if it may have submitted some of the copies: vLLM
            submits the stores of requests that ended one step late.

    """
    metadata = coming.kv_connector_metadata if coming is not None else None
    parts = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else (metadata,)
    stores: dict[int, Any] = {}
    for part in parts:
        if isinstance(part, OffloadingConnectorMetadata):
            stores = part.store_jobs
    for connector in connectors_of(get_kv_transfer_group()):
        if isinstance(connector, OffloadingConnector):
            with gpu_sync_allowed():
                connector.handle_preemptions(OffloadingConnectorMetadata({}, stores, jobs))
