"""The worker's half of vLLM's offload without a model: it copies as late as vLLM allows."""

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

LATE = 6
"""Steps within which a copy out of the KV cache is made."""


class ShadowOffload:
    """Copies blocks between the shadow's memory and a host's, in vLLM's order.

    Args:
        memory: What every block of the KV cache holds.
        chunk: Blocks of one chunk of host memory.
        seed: Draws how many steps late each copy is made.

    """

    def __init__(self, memory: list[list[int | None]], chunk: int, seed: int) -> None:
        self.loads = 0
        self.waited = 0
        """Copies that were made because an eviction waited for them."""
        self._memory = memory
        self._chunk = chunk
        self._host: dict[tuple[int, int], list[int | None]] = {}
        self._rng = Random(seed)
        self._unsubmitted: dict[int, Any] = {}
        self._stores: deque[list[Any]] = deque()
        self._loads: deque[list[Any]] = deque()
        self._done: list[int] = []
        self._received: set[str] = set()

    @property
    def loading(self) -> bool:
        return bool(self._loads or self._received)

    def before(self, metadata: Any) -> None:
        """What comes before a forward pass."""
        flush = metadata.jobs_to_flush or set()
        self.settle(flush, metadata)
        self.waited -= len(flush)

    def settle(self, jobs: set[int], coming: Any = None) -> None:
        """Begin what was not begun, and make these copies and those before them.

        Those among ``coming``, which a step brings with it, are begun now as well.
        """
        for job_id in jobs & coming.store_jobs.keys() if coming is not None else ():
            self._unsubmitted[job_id] = coming.store_jobs.pop(job_id)
        for job_id, job in self._unsubmitted.items():
            self._stores.append([job_id, job, self._rng.randrange(LATE)])
        self._unsubmitted.clear()
        for queue, store in ((self._stores, True), (self._loads, False)):
            while any(entry[0] in jobs for entry in queue):
                self.waited += 1
                self._make(queue.popleft(), store)

    def after(self, metadata: Any) -> KVConnectorOutput:
        """What comes after a forward pass, and what is reported then."""
        for job_id, job in metadata.load_jobs.items():
            self._loads.append([job_id, job, self._rng.randrange(4)])
        self._unsubmitted |= metadata.store_jobs
        for queue, store in ((self._stores, True), (self._loads, False)):
            for entry in queue:
                entry[2] -= 1
            while queue and queue[0][2] < 0:
                self._make(queue.popleft(), store)
        done, received = self._done, self._received
        self._done, self._received = [], set()
        return KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys(done, 1)),
        )

    def _make(self, entry: list[Any], store: bool) -> None:
        job_id, job, _ = entry
        inside, outside = (job.src_spec, job.dst_spec) if store else (job.dst_spec, job.src_spec)
        for block, place in self._pairs(inside, list(outside.block_ids)):
            if store:
                self._host[place] = list(self._memory[block])
            else:
                self._memory[block] = list(self._host[place])
        self._done.append(job_id)
        if not store:
            self.loads += 1
            self._received.add(job.req_id)

    def _pairs(self, inside: Any, chunks: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
        blocks = iter(int(block) for block in inside.block_ids)
        for count, first in zip(inside.group_sizes, inside.block_indices, strict=True):
            part = first % self._chunk
            for number in range(count):
                if number == 0 or part == 0:
                    chunk = int(chunks.pop(0))
                yield next(blocks), (chunk, part)
                part = (part + 1) % self._chunk
        assert not chunks and next(blocks, None) is None
