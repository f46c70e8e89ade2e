"""Finishes copies of vLLM's offload before an eviction writes to what they read."""

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


def settle(jobs: set[int]) -> None:
    """Wait until these copies are made; those of the step that was run are begun first.

    Args:
        jobs: Numbers of the copies, as the scheduler's half gave them out; those that are made
            already cost nothing.

    """
    with gpu_sync_allowed():
        get_kv_transfer_group().handle_preemptions(OffloadingConnectorMetadata({}, {}, jobs))
