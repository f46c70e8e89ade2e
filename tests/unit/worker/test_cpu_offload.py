"""Copies between a KV cache and host memory, block by block."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_kvevict.worker.cpu_offload import CopyingWorker

BLOCKS, CHUNKS = 24, 30


def caches(groups: list[int]) -> CanonicalKVCaches:
    """Groups of so many layers, each layer with a cache of its own and pages of its own size."""
    tensors, refs = [], []
    for layers in groups:
        refs.append([])
        for _ in range(layers):
            page = 8 * (1 + len(tensors))
            content = torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8)
            refs[-1].append(CanonicalKVCacheRef(len(tensors), page))
            tensors.append(CanonicalKVCacheTensor(content, page))
    return CanonicalKVCaches(tensors, refs)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_stored_is_what_is_loaded(data: st.DataObject) -> None:
    """Any blocks to any chunks, also from inside a chunk, and into other blocks."""
    groups = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    size = data.draw(st.integers(1, 3))
    kept = caches(groups)
    worker = CopyingWorker(kept, size, CHUNKS)
    counts, firsts, sources, targets, chunks = [], [], [], [], []
    free = list(range(BLOCKS))
    free_chunks = data.draw(st.permutations(range(CHUNKS)))
    for _ in groups:
        count = data.draw(st.integers(0, 4))
        first = data.draw(st.integers(0, 5))
        counts.append(count)
        firsts.append(first)
        sources += [free.pop() for _ in range(count)]
        used = -(-(first % size + count) // size) if count else 0
        chunks += [free_chunks.pop() for _ in range(used)]
    targets = data.draw(st.permutations(range(BLOCKS)))[: len(sources)]
    stored = GPULoadStoreSpec(sources, group_sizes=counts, block_indices=firsts)
    loaded = GPULoadStoreSpec(targets, group_sizes=counts, block_indices=firsts)
    before = [one.tensor.clone() for one in kept.tensors]
    assert worker.submit_store(1, stored, CPULoadStoreSpec(chunks))
    worker.wait({1})
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, kept.tensors, strict=True))
    for one in kept.tensors:
        one.tensor.zero_()
    # As vLLM 0.33 submits what it waits for within the step.
    more = dict(expedited=True) if data.draw(st.booleans()) else {}
    assert worker.submit_load(2, CPULoadStoreSpec(chunks), loaded, **more)
    worker.wait({1, 2, 77})
    place = 0
    for refs, count in zip(kept.group_data_refs, counts, strict=True):
        mine = range(place, place + count)
        for ref in refs:
            now = kept.tensors[ref.tensor_idx].tensor
            for number in mine:
                expected = before[ref.tensor_idx][sources[number]]
                assert torch.equal(now[targets[number]], expected)
            others = set(range(BLOCKS)) - {targets[number] for number in mine}
            assert not now[sorted(others)].any()
        place += count
    done = {one.job_id: one for one in worker.get_finished()}
    assert done.keys() == {1, 2} and all(one.success for one in done.values())
    pages = [sum(ref.page_size_bytes for ref in refs) for refs in kept.group_data_refs]
    assert done[1].transfer_size == sum(c * p for c, p in zip(counts, pages, strict=True))
    assert worker.get_finished() == []
    worker.shutdown()


def test_a_copy_is_made_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and it is reported when it is made; an error is not lost."""
    begin = threading.Event()
    copy = CopyingWorker._copy

    def slow(self, *args):
        assert begin.wait(10)
        return copy(self, *args)

    monkeypatch.setattr(CopyingWorker, "_copy", slow)
    worker = CopyingWorker(caches([1]), 1, CHUNKS)
    spec = GPULoadStoreSpec([3], group_sizes=[1], block_indices=[0])
    assert worker.submit_store(5, spec, CPULoadStoreSpec([2])) and worker.get_finished() == []
    assert worker.submit_store(6, spec, CPULoadStoreSpec([CHUNKS])), "beyond the memory"
    begin.set()
    worker.wait({5})
    with pytest.raises(IndexError):
        worker.wait({6})
    worker.shutdown()
