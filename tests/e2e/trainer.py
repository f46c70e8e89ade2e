"""What a trainer adds to vLLM's workers: the methods that frameworks for rollouts call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TrainerExtension:
    """A worker extension (``worker_extension_cls``) that loads weights past the worker."""

    model_runner: Any

    def trainer_loads(self, folder: str) -> str:
        """Load the weights of a checkpoint tensor by tensor.

        verl, OpenRLHF, SkyRL and TRL call ``model_runner.model.load_weights`` for each tensor. On
        vLLM's CPU platform only a reload replaces linear weights, because they are packed.
        """
        self.model_runner.reload_weights(weights_iterator=self._tensors(folder))
        return type(self).__name__

    def _tensors(self, folder: str) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(str(file), "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    def trainer_loads_embeddings(self, folder: str) -> None:
        """Load what is not packed, as these frameworks do."""
        for name, tensor in self._tensors(folder):
            if "embed_tokens" in name:
                self.model_runner.model.load_weights([(name, tensor)])
