"""Workers on a CPU that sleep as those of a GPU do, over a pretended allocator."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm import device_allocator
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from tests.e2e import gpu_on_cpu
from tests.pretend_allocator import Allocator
from vllm_kvevict.worker.cpu import EvictingCPUWorker


class SleepingWorker(CPUWorker):
    """vLLM's CPU worker with the sleep mode of its CUDA worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.allocator = Allocator()
        device_allocator.get_mem_allocator_instance = lambda: self.allocator
        super().__init__(*args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return self.allocator.use_memory_pool(tag)

    def sleep(self, level: int = 1) -> None:
        torch.accelerator.synchronize = lambda: None
        torch.accelerator.get_memory_info = lambda: (gpu_on_cpu.FREE, gpu_on_cpu.FREE)
        Worker.sleep(self, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        Worker.wake_up(self, tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        Worker.discard(self, tags)


class EvictingSleepingWorker(EvictingCPUWorker, SleepingWorker):
    """The worker of a CPU rank."""


class PretendedGPUWorker(gpu_on_cpu.Worker, SleepingWorker):
    """The worker of a CUDA rank."""
