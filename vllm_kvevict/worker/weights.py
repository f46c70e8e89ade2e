"""Changes of a worker's weights, after which stores must not go to the files of the old ones."""

from hashlib import sha256
from typing import Any

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvevict.stores.weights import weights_in_memory
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.ranks import of_ranks


class WeightsMixin(Worker):
    """Notices each method of vLLM's worker that changes weights in place."""

    kv_eviction: WorkerEviction | None

    def _weights(self) -> str:
        """Return the checksum of the weights of all ranks; every rank must call it."""
        with gpu_sync_allowed():
            digest = bytearray.fromhex(weights_in_memory(self.model_runner.get_model()))
            digests = of_ranks(torch.frombuffer(digest, dtype=torch.uint8).to(self.device))
            return sha256(digests.cpu().numpy().tobytes()).hexdigest()

    def _watch_weights(self) -> None:
        """Notice updates that call the model's ``load_weights``, as worker extensions of trainers
        do."""
        model = self.model_runner.get_model()
        load = getattr(model, "load_weights", None)
        if load is None:
            return

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            self._weights_change()
            return load(*args, **kwargs)

        setattr(model, "load_weights", load_weights)  # noqa: B010

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._weights_change()
        super().reload_weights(*args, **kwargs)

    def start_weight_update(self) -> None:
        self._weights_change()
        super().start_weight_update()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        self._weights_change()
        super().update_weights(*args, **kwargs)

    def reset_weights(self) -> None:
        self._weights_change()
        super().reset_weights()

    def _weights_change(self) -> None:
        """Keep stores computed with other weights out of the files that other servers read."""
        if self.kv_eviction is not None and self.kv_eviction.stores.tiers is not None:
            self.kv_eviction.stores.tiers.weights_change()
