"""Loads of a connector wait for the evictions that still use their blocks.

Evictions are enqueued on the device after sampling, and the scheduler gives the blocks that they
replace to other requests without waiting. A kernel of a later step comes after them in the stream,
but the host posts point-to-point transfers past the stream. Without a fence, a transfer could write
to a block from which survivors are still to be moved.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


class LoadFence:
    """Lets ``start_load_kv`` of a connector wait for the evictions enqueued before.

    vLLM starts asynchronous loads after it has launched the forward pass, so the device has work
    while the host waits. Steps that start no load wait for nothing.

    Args:
        connector: The connector of this worker; its method is replaced on the instance.

    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self._connector = connector
        self._event = torch.cuda.Event()
        self._pending = False
        start: Callable[..., Any] = connector.start_load_kv

        def start_load_kv(forward_context: Any, **kwargs: Any) -> None:
            if self._pending and self._starts_loads():
                with gpu_sync_allowed():
                    self._event.synchronize()
                self._pending = False
            start(forward_context, **kwargs)

        connector.start_load_kv = start_load_kv

    def record(self) -> None:
        """Record that evictions were enqueued."""
        self._event.record()
        self._pending = True

    def _starts_loads(self) -> bool:
        """Return whether the metadata of the step names loads, or does not say so."""
        metadata = self._connector._get_connector_metadata()
        pulls = getattr(metadata, "reqs_to_recv", True)
        return bool(pulls or getattr(metadata, "push_registrations", False))
