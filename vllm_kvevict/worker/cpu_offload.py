"""KV-cache offload for vLLM's CPU platform, for which vLLM has no offloading worker."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks of a KV cache in main memory to other main memory, in order, in one thread.

    Args:
        caches: The KV caches, each [num_blocks, page bytes] int8.
        blocks_per_chunk: Blocks that one chunk of the offloaded memory holds.
        num_chunks: Chunks of the offloaded memory.

    """

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in caches.group_data_refs]
        self._caches = [cache.tensor for cache in caches.tensors]
        self._blocks_per_chunk = blocks_per_chunk
        blocks = num_chunks * blocks_per_chunk
        self._memory = [
            torch.zeros(blocks, cache.page_size_bytes, dtype=torch.int8) for cache in caches.tensors
        ]
        self._thread = ThreadPoolExecutor(1, "kv-offload")
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        # vLLM 0.33 waits for expedited loads within the step. One thread runs all jobs in order.
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def _submit(
        self, job_id: int, inside: GPULoadStoreSpec, outside: LoadStoreSpec, store: bool
    ) -> bool:
        assert isinstance(outside, BlockIDsLoadStoreSpec)
        pairs = list(self._pairs(inside, outside))
        self._running[job_id] = self._thread.submit(self._copy, job_id, pairs, store)
        return True

    def _pairs(
        self, inside: GPULoadStoreSpec, outside: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (tensor, blocks of the KV cache, blocks of the memory) of every copy.

        The blocks of a group are consecutive in its request, and so are its chunks. The first
        block may lie inside its chunk.
        """
        blocks = torch.from_numpy(inside.block_ids).long()
        chunks = torch.from_numpy(outside.block_ids).long()
        size = self._blocks_per_chunk
        for tensors, count, first in zip(
            self._groups, inside.group_sizes, inside.block_indices, strict=True
        ):
            if not count:
                continue
            skipped = first % size
            used = -(-(skipped + count) // size)
            places = (chunks[:used, None] * size + torch.arange(size)).flatten()
            places = places[skipped : skipped + count]
            for tensor in tensors:
                yield tensor, blocks[:count], places
            blocks, chunks = blocks[count:], chunks[used:]

    def _copy(
        self, job_id: int, pairs: list[tuple[int, torch.Tensor, torch.Tensor]], store: bool
    ) -> TransferResult:
        begun, size = time.monotonic(), 0
        for tensor, blocks, places in pairs:
            cache, memory = self._caches[tensor], self._memory[tensor]
            if store:
                memory[places] = cache[blocks]
            else:
                cache[blocks] = memory[places]
            size += len(blocks) * memory.shape[1]
        return TransferResult(job_id, True, size, time.monotonic() - begun)

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, copy in self._running.items() if copy.done()]
        return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self._running:
                self._running[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown()


class MainMemorySpec(CPUOffloadingSpec):
    """vLLM's offload to host memory, with :class:`CopyingWorker` instead of CUDA copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
