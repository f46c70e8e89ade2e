"""The host never waits for a CUDA device: evictions by the kernels, and the layout of a step.

The device is pretended, its kernels are emulated: results are real, waits are those that torch
would make.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.evict import NAMES, ONE_OF_A_KIND, ROWS, assert_same, run, steps, worker
from tests.nightly import covering
from tests.pretend_gpu import pretended
from vllm_kvevict.attention import gpu_buffers
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.rules.step_plan import PLAN, ReusedStore, StepPlan

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def watch(monkeypatch):
    with pretended(monkeypatch) as watching:
        yield watching


WAITS = {
    "read": lambda x: x.sum().item(),
    "decide": lambda x: bool(x[0, 0] > 0),
    "print": lambda x: f"{x[0, 0]} {x}",
    "equal": lambda x: torch.allclose(x, x),
    "a number for one element": lambda x: x.__setitem__((0, 1), 5),
    "numbers by index": lambda x: x.__setitem__(torch.arange(1, device=x.device), 5),
    "a number of the host for one element": lambda x: x.__setitem__((0, 1), torch.tensor(5)),
    "index of the host": lambda x: x[torch.tensor([0])],
    "index by a list": lambda x: x[[0, 1]],
    "index by numpy": lambda x: x[np.array([0, 1])],
    "index by a range": lambda x: x[range(2)],
    "index by a number of the device": lambda x: x[x[0].long()[0]],
    "slice by a number of the device": lambda x: x[: x[0].long()[0]],
    "boolean index": lambda x: x[x > 0],
    "boolean put": lambda x: x.index_put_((x > 0,), x[0, 0]),
    "put of a host number": lambda x: x.index_put_((x[0].long()[:1],), torch.tensor(5.0)),
    "put at places of the host": lambda x: x.index_put_((torch.tensor([0]),), x[:1] + 1),
    "sizes": lambda x: x.nonzero(),
    "sizes inside": lambda x: x.repeat_interleave(x[0].int(), 1),
    "counts": lambda x: x[0].long().bincount(),
    "values": lambda x: x.unique(),
    "values by mask": lambda x: x.masked_select(x > 0),
    "membership": lambda x: 5 in x,
    "runs": lambda x: x[0].unique_consecutive(),
    "members": lambda x: torch.isin(x, x[0]),
    "inverse": lambda x: torch.linalg.inv(torch.eye(2, device=x.device)),
    "upload": lambda x: torch.zeros(2).to(x.device, non_blocking=True),
    "blocking upload": lambda x: torch.zeros(2, pin_memory=True).to(x.device),
    "upload to a tensor's device": lambda x: torch.zeros(2).to(x),
    "upload of a column": lambda x: x[:, 0].copy_(pinned(2, 3)[:, 0], non_blocking=True),
    "repeated upload": lambda x: x.copy_(pinned(3), non_blocking=True),
    "made of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "made of numpy": lambda x: torch.as_tensor(np.ones(2), device="cuda"),
    "made of a host tensor": lambda x: torch.asarray(pinned(2), device="cuda:0"),
    "made like a tensor": lambda x: x.new_tensor([1, 2]),
    "made of numbers of the device": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "full of a number of the device": lambda x: torch.full((2,), x[0, 0], device="cuda"),
    "as many as a number of the device": lambda x: torch.arange(x[0, 0], device="cuda"),
    "choice of a host number": lambda x: torch.where(x > 0, x, torch.tensor(5.0)),
    "masked by a number of the device": lambda x: x.masked_fill(x > 0, x[0, 0]),
    "host filled from the device": lambda x: torch.tensor(5.0).fill_(x[0, 0]),
    "host added to from the device": lambda x: torch.tensor(5.0).add_(x[0, 0]),
    "download": lambda x: x.cpu(),
    "download into pageable memory": lambda x: torch.empty(3).copy_(x[0], non_blocking=True),
    "download into a column": lambda x: pinned(2, 3)[:, 0].copy_(x[:, 0], non_blocking=True),
    "copy": lambda x: x[0].copy_(torch.zeros(3)),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "wait for an event": lambda x: torch.cuda.Event().synchronize(),
}
FREE = {
    "fill": lambda x: x[0, 1].fill_(5),
    "fill with a number of the device": lambda x: x[0].fill_(x[0, 0]),
    "fill by index": lambda x: x.index_fill_(0, torch.arange(1, device=x.device), 5),
    "a number for a row": lambda x: x.__setitem__(0, 5),
    "a row for a row": lambda x: x.__setitem__(0, x[1]),
    "pinned upload": lambda x: torch.zeros(2, pin_memory=True).to(x.device, non_blocking=True),
    "part of a pinned upload": lambda x: x[0, :2].copy_(pinned(4)[1:3], non_blocking=True),
    "widened upload": lambda x: pinned(2).to("cuda", torch.float64, non_blocking=True),
    "download later": lambda x: torch.empty(3, pin_memory=True).copy_(x[0], non_blocking=True),
    "download to the host": lambda x: x.to("cpu", non_blocking=True),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "index by a number": lambda x: x[np.int64(1), 0],
    "put": lambda x: x.index_put_((torch.arange(1, device="cuda"),), x[:1] + 1),
    "fixed repeats": lambda x: x.repeat_interleave(2, 0),
    "repeats of known size": lambda x: x.repeat_interleave(x[0].int()[:2], 0, output_size=2),
    "made": lambda x: torch.full((2,), 5, device=x.device) + torch.zeros_like(x)[0, :2],
    "host made like it": lambda x: torch.empty_like(x, device="cpu", pin_memory=True),
    "the same tensor": lambda x: torch.as_tensor(x, device="cuda").to(x.device),
    "a number of the host": lambda x: x * torch.tensor(5.0),
    "choice of a number": lambda x: torch.where(x > 0, x, 5.0),
    "choice": lambda x: torch.where(x > 0, x, x[0, 0]),
    "ask an event": lambda x: torch.cuda.Event().query(),
}


def pinned(*shape):
    return torch.zeros(shape, pin_memory=True)


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
@pytest.mark.parametrize(
    ("policy", "networks", "shares"),
    covering(ONE_OF_A_KIND, [pytest.param(True, id="shares"), pytest.param(False, id="")]),
)
def test_evictions_wait_for_nothing(policy, networks, shares, monkeypatch):
    options = dict(shares=shares, networks=networks)
    plain, plans = worker(policy, fused=False, **options), steps(policy)
    plain._rows.begin_step = lambda output: [0, 2]
    run(plain, plans)
    monkeypatch.setitem(extension._namespaces, "cuda", extension._namespaces["cpu"])
    monkeypatch.setattr(extension, "_load_installed", lambda: None)
    with pretended(monkeypatch) as watch:
        fused = worker(policy, fused=True, device="cuda", **options)
        monkeypatch.setattr(fused, "_evict", None)
        # Two requests have finished before every step.
        fused._rows.begin_step = lambda output: [0, 2]
        watch.waits.clear()
        run(fused, plans)
        assert fused.meter.take() is None
        watch.stream.finish()
        assert fused.evictions == 4 and len(fused.meter.take()["seconds"]) == 4
        assert watch.launches > 100 and not watch.waits
        assert fused.cache(NAMES[0]).pages.is_cuda
    assert_same(fused, plain)


@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_the_layout_of_a_step_waits_for_nothing(kernel, monkeypatch):
    plans = steps("ada-snapkv")
    for name in ("head_lengths", "plan_slices"):
        monkeypatch.setattr(gpu_buffers, name, lambda *arguments: None)
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
            seq_lens_cpu_upper_bound=torch.full((ROWS,), 200, dtype=torch.int32),
            block_table_tensor=torch.zeros(ROWS, 20, dtype=torch.int32, device="cuda"),
            max_seq_len=200,
        )
        watch.waits.clear()
        slots = torch.tensor([-1, 0, 1, -1])
        for by_slices in (False, True):
            buffers.decode(common, rows, slots, by_slices)
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
        reused = {"a": [ReusedStore(1, 208, [66, 67])]}
        made.begin_step(SimpleNamespace(**{PLAN: StepPlan(reused=reused)}))
        made.batch_rows(SimpleNamespace())
        assert watch.launches and not watch.waits
        assert bool(state.evicted[3]) and state.shorter[3] == state.shorter[1] > 0
    for table in (state.tail_start, state.stores):
        assert torch.equal(table[3].cpu(), table[1].cpu())
    assert state.head_indptr[:, 3].tolist() == [[0, 1, 3, 6]] * len(state.layer_names)
