"""What sleep mode frees with the KV cache is written again."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from tests.kernels.evict import BLOCK, HEADS, ROWS, SIZE, worker
from tests.pretend_gpu import pretended
from tests.tensors import tensors_of
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.worker import workspace as sizing
from vllm_kvevict.worker.gpu import EvictingWorker
from vllm_kvevict.worker.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def asleep(monkeypatch):
    """Calls of vLLM's worker, which frees and overwrites nothing."""
    calls = []
    monkeypatch.setattr(Worker, "sleep", lambda self, level: calls.append(("sleep", level)))
    monkeypatch.setattr(Worker, "discard", lambda self, tags: calls.append(("discard", tags)))
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags: calls.append(("wake", tags)))
    return calls


def engine_worker(made) -> EvictingWorker:
    """The CUDA worker around these evictions, as after its start."""
    found = EvictingWorker.__new__(EvictingWorker)
    state = made.states[0]
    found._scratch = Scratch("triton", Shape(HEADS, 2, SIZE, BLOCK, ROWS, 512), torch.device("cpu"))
    found._buffers = [GroupBuffers(state, found._scratch, torch.device("cpu"))]
    found._rings, found._cache_is_lost, found.kv_eviction = None, False, made
    found._workspace = Workspace(4096, torch.device("cpu"))
    return found


LOSSES = {
    "sleep": lambda found: found.sleep(2),
    "release": lambda found: found.discard(("kv_cache",)),
    "release, then sleep": lambda found: (found.discard(("kv_cache",)), found.sleep(1)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_buffers_are_written_again(asleep, loss):
    made = worker("ada-snapkv", fused=False)
    found, fresh = engine_worker(made), engine_worker(made)
    LOSSES[loss](found)
    for tensor in tensors_of(found._scratch, found._buffers, but=GroupState):
        tensor.fill_(77)
    found.wake_up(["weights"])
    assert bool((found._buffers[0]._count == 77).all()), "its memory is not back yet"
    found.wake_up(["kv_cache"])
    assert asleep[-2:] == [("wake", ["weights"]), ("wake", ["kv_cache"])]
    for name in ("_rows_and_slots", "_ones", "_count"):
        assert torch.equal(*(vars(one._buffers[0])[name] for one in (found, fresh)))
    assert not found._scratch.partials.arrived.any() and not found._scratch.table.any()


def test_nothing_is_reset_that_was_not_lost(asleep):
    """As after ``collective_rpc("wake_up")``, or the loss of weights alone."""
    found = engine_worker(worker("ada-snapkv", fused=False))
    (state, *_) = found.kv_eviction.states.values()
    state.tail_start.fill_(64)
    found.discard(("weights",))
    found.wake_up()
    assert bool((state.tail_start == 64).all())


def test_stores_in_host_memory_are_freed_while_the_engine_sleeps(asleep):
    """In vLLM's order: the caches are reset, and no step follows before it sleeps."""
    made, cleared = worker("ada-snapkv", fused=False), []
    made.stores.tiers = SimpleNamespace(clear=lambda: cleared.append(len(asleep)))
    engine_worker(made).sleep(1)
    assert cleared == [0] and asleep == [("sleep", 1)]


def test_the_workspace_is_freed_while_the_engine_sleeps(asleep, monkeypatch):
    with pretended(monkeypatch) as watch:
        found = engine_worker(worker("ada-snapkv", fused=False))
        workspace = found._workspace = Workspace(1 << 20, torch.device("cuda"))
        workspace.open()
        held = [sizing.SMALL_BYTES] * sizing.SMALL_COUNT + [1 << 20]
        assert workspace._pool is not None
        found.sleep()
        assert workspace._pool is None and not workspace._held
        watch.memory.peak = watch.memory.live
        before = watch.memory.live
        found.wake_up()
        assert watch.memory.peak - before == sum(held) and watch.memory.live == before
        assert workspace._pool is not None
