"""Finishes copies of vLLM's offload before we write to what they read."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def settle(jobs: set[int], coming: "SchedulerOutput | None" = None) -> None:
    """Wait until these copies are made; those of the step that was run are begun first.

    Args:
        jobs: Numbers of the copies, as the scheduler's half gave them out; those that are made
            already cost nothing.
        coming: The step that is about to run, where it may have brought some of them: vLLM names
            what requests that ended leave one step late.

    """
    metadata = coming.kv_connector_metadata if coming is not None else None
    stores = metadata.store_jobs if isinstance(metadata, OffloadingConnectorMetadata) else {}
    with gpu_sync_allowed():
        get_kv_transfer_group().handle_preemptions(OffloadingConnectorMetadata({}, stores, jobs))
