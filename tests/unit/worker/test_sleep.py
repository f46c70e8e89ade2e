"""What sleep mode frees comes back with the content that evictions need."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from tests.kernels.evict import (
    BLOCK,
    HEADS,
    ROWS,
    SIZE,
    assert_same,
    run,
    steps,
    worker,
)
from tests.pretend_gpu import pretended
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.worker import workspace as sizing
from vllm_kvevict.worker.gpu import EvictingWorker
from vllm_kvevict.worker.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def asleep(monkeypatch):
    """Calls of vLLM's worker, which frees and overwrites nothing."""
    calls = []
    monkeypatch.setattr(Worker, "sleep", lambda self, level: calls.append(("sleep", level)))
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags: calls.append(("wake", tags)))
    return calls


def engine_worker(made) -> EvictingWorker:
    """The CUDA worker around these evictions, as after its start."""
    found = EvictingWorker.__new__(EvictingWorker)
    state = made.states[0]
    found._scratch = Scratch("triton", Shape(HEADS, 2, SIZE, BLOCK, ROWS, 512), torch.device("cpu"))
    found._buffers = [GroupBuffers(state, found._scratch, torch.device("cpu"))]
    # What rings hold is lost, and here the evictions before and after read the same.
    found._rings, found._asleep, found.kv_eviction = None, None, made
    found._workspace = Workspace(4096, torch.device("cpu"))
    return found


def scribble(found: EvictingWorker) -> None:
    """Overwrite what a GPU frees."""
    tensors = [*found.kv_eviction.probe_weights(), *vars(found._scratch.partials).values()]
    buffers = found._buffers[0]
    tensors += [buffers.lengths, buffers.slices.pieces, *buffers.constants]
    for tensor in tensors:
        tensor.fill_(77)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("fused", [False, True], ids=["pytorch", "kernels"])
def test_probes_and_buffers_outlive_a_sleep(fused, asleep):
    options = dict(networks=True)
    plain, made = (worker("ada-probe", fused=fused, **options) for _ in range(2))
    for state in plain.states.values():
        state.reset()
    run(plain, steps("ada-probe"))
    found = engine_worker(made)
    count = found._buffers[0].constants[1].clone()
    weights = [tensor.clone() for tensor in made.probe_weights()]
    assert len(weights) > 4 and all(bool(tensor.any()) for tensor in weights)
    found.sleep(2)
    scribble(found)
    found.wake_up(["weights"])
    assert bool((found._buffers[0].constants[1] == 77).all()), "its memory is not back yet"
    found.wake_up(["kv_cache"])
    assert asleep == [("sleep", 2), ("wake", ["weights"]), ("wake", ["kv_cache"])]
    assert torch.equal(found._buffers[0].constants[1], count)
    assert bool((found._buffers[0].constants[0] == 1).all())
    assert not found._scratch.partials.arrived.any()
    run(made, steps("ada-probe"))
    assert made.evictions == plain.evictions > 0
    assert_same(made, plain)


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
