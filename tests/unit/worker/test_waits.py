"""The host never waits for a CUDA device: evictions by the kernels, and the layout of a step.

The device is pretended, its kernels are emulated: results are real, waits are those that torch
would make.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.evict import FUSED, NAMES, ROWS, assert_same, run, steps, worker
from tests.pretend_gpu import pretended
from vllm_kvevict.attention import ragged
from vllm_kvevict.attention.ragged import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.schedule.step_plan import PLAN, StepPlan, TakenStore

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def watch(monkeypatch):
    with pretended(monkeypatch) as watching:
        yield watching


WAITS = {
    "read": lambda x: x.sum().item(),
    "decide": lambda x: bool(x[0, 0] > 0),
    "a number for one element": lambda x: x.__setitem__((0, 1), 5),
    "numbers by index": lambda x: x.__setitem__(torch.arange(1, device=x.device), 5),
    "index of the host": lambda x: x[torch.tensor([0])],
    "boolean index": lambda x: x[x > 0],
    "sizes": lambda x: x.nonzero(),
    "sizes inside": lambda x: x.repeat_interleave(x[0].int(), 1),
    "upload": lambda x: torch.zeros(2).to(x.device, non_blocking=True),
    "blocking upload": lambda x: torch.zeros(2, pin_memory=True).to(x.device),
    "download": lambda x: x.cpu(),
    "copy": lambda x: x[0].copy_(torch.zeros(3)),
}
FREE = {
    "fill": lambda x: x[0, 1].fill_(5),
    "a number for a row": lambda x: x.__setitem__(0, 5),
    "pinned upload": lambda x: torch.zeros(2, pin_memory=True).to(x.device, non_blocking=True),
    "download later": lambda x: torch.empty(3, pin_memory=True).copy_(x[0], non_blocking=True),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "fixed repeats": lambda x: x.repeat_interleave(2, 0),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
def test_the_watch_sees_waits(call, watch):
    tensor = torch.ones(2, 3, device="cuda")
    assert not watch.waits
    call(tensor)
    assert watch.waits


@pytest.mark.parametrize("call", FREE.values(), ids=FREE)
def test_the_watch_sees_no_others(call, watch):
    call(torch.ones(2, 3, device="cuda"))
    assert not watch.waits


def test_tensors_of_two_devices_do_not_meet(watch):
    mine, host = torch.ones(2, device="cuda"), torch.ones(2)
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        mine.add(host)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("policy", FUSED)
def test_evictions_wait_for_nothing(policy, monkeypatch):
    plain, plans = worker(policy, fused=False), steps(policy)
    plain._rows.begin_step = lambda output: [0, 2]
    run(plain, plans)
    monkeypatch.setitem(extension._namespaces, "cuda", extension._namespaces["cpu"])
    monkeypatch.setattr(extension, "_load_installed", lambda: None)
    with pretended(monkeypatch) as watch:
        fused = worker(policy, fused=True, device="cuda")
        # Two requests have finished before every step.
        fused._rows.begin_step = lambda output: [0, 2]
        watch.waits.clear()
        run(fused, plans)
        assert fused.evictions == 4 and len(fused.meter.take()["seconds"]) == 4
        assert watch.launches > 100 and not watch.waits
        assert fused.cache(NAMES[0]).pages.is_cuda
    assert_same(fused, plain)


@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_the_layout_of_a_step_waits_for_nothing(kernel, monkeypatch):
    plans = steps("ada-snapkv")
    for name in ("head_lengths", "plan_splits"):
        monkeypatch.setattr(ragged, name, lambda *arguments: None)
    made = worker("ada-snapkv", fused=False)
    run(made, plans)
    with pretended(monkeypatch) as watch:
        state = worker("ada-snapkv", fused=False, device="cuda").states[0]
        state.evicted, state.shorter = made.states[0].evicted, made.states[0].shorter
        scratch = Scratch(kernel, Shape(3, 2, 64, 16, ROWS, 512), torch.device("cpu"))
        buffers = GroupBuffers(state, scratch, state.tail_start.device)
        rows, places = torch.arange(ROWS), torch.arange(ROWS)
        starts = torch.tensor([0, 1, 2, 5, 6], dtype=torch.int32)
        common = SimpleNamespace(
            num_reqs=ROWS,
            query_start_loc_cpu=starts,
            seq_lens=torch.full((ROWS,), 200, dtype=torch.int32, device="cuda"),
            block_table_tensor=torch.zeros(ROWS, 20, dtype=torch.int32, device="cuda"),
            max_seq_len=200,
        )
        watch.waits.clear()
        slots = torch.tensor([-1, 0, 1, -1])
        for by_splits in (False, True):
            buffers.decode(common, rows, slots, by_splits)
        buffers.some_decode(common, rows[:2], places[:2])
        buffers.extend(common, rows[2:3], places[2:3])
        buffers.recording(common, slots, 8)
        buffers.hide(common.seq_lens, state.evicted)
        assert bool(state.evicted.any()) and watch.launches and not watch.waits


def test_taking_a_store_waits_for_nothing(monkeypatch):
    with pretended(monkeypatch) as watch:
        made = worker("ada-snapkv", fused=False, device="cuda", slots=100)
        state = made.states[1]
        store = torch.tensor([66, 67], device="cuda")
        pages = torch.tensor([[1, 2, 3]] * len(state.layer_names), device="cuda")
        state.record(1, 208, store, pages)
        watch.waits.clear()
        state.keep(1, 66)
        made._rows.batch_rows = lambda common: np.array([0, 3])
        taken = {"a": [TakenStore(1, 208, [66, 67])]}
        made.begin_step(SimpleNamespace(**{PLAN: StepPlan(taken=taken)}))
        made.batch_rows(SimpleNamespace())
        assert watch.launches and not watch.waits
        assert bool(state.evicted[3]) and state.shorter[3] == state.shorter[1] > 0
    for table in (state.tail_start, state.stores):
        assert torch.equal(table[3].cpu(), table[1].cpu())
    assert state.head_indptr[:, 3].tolist() == [[0, 1, 3, 6]] * len(state.layer_names)
