"""The host never waits for a CUDA device in the worker's steps, from a plan to what was measured.

The device is pretended and late; evictions run on emulated kernels, attention runs nothing.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from tests.interpreted.fakes import Backend, common_of
from tests.kernels.evict import BLOCK, BLOCKS, GROUP, GROUPS, HEADS, NAMES, ROWS, SIZE, steps
from tests.kernels.evict import worker as eviction_of
from tests.nightly import covering
from tests.pretend_gpu import pretended
from tests.pretend_launches import stub_launches
from tests.ragged import Ragged, random_ragged
from tests.unit.worker.test_runners import step
from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.metrics.report import MEASURED
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.rules.step_plan import PLAN, ReusedStore, StepPlan
from vllm_kvevict.worker.mixin import EvictionWorkerMixin
from vllm_kvevict.worker.runners import RowsV1, RowsV2

pytestmark = pytest.mark.usefixtures("one_rank", "emulation")
INDEX = {"a": 3, "b": 2, "c": 1, "d": 0}


class Runner(Worker):
    """A step's attention, laid out and run as vLLM's model runners do it."""

    def execute_model(self, output):
        self.runner.input_batch.req_ids = list(output.counts)
        rows = np.array([INDEX[name] for name in output.counts])
        self.runner.model_state.prepare_attn(SimpleNamespace(idx_mapping_np=rows))
        query = torch.zeros(sum(output.counts.values()), HEADS * GROUP, SIZE, device="cuda")
        for backend, group in zip(self.backends, GROUPS.values(), strict=True):
            metadata = backend.builder.build(0, output.common)
            assert metadata.recording is not None
            for name in group:
                cache = self.kv_eviction.cache(name).pages.view(BLOCKS, HEADS, BLOCK, 2 * SIZE)
                backend.forward(NAMES.index(name), query, cache, metadata)

    def sample_tokens(self, grammar_output):
        return ModelRunnerOutput(["a"], {"a": 0})


class Steps(EvictionWorkerMixin, Runner):
    _register_backend = _layer_cache = _failed_loads = None


def made(kernel, rows, eviction, fp8):
    """A worker on the device, whose model runner is ours."""
    made = Steps.__new__(Steps)
    made.kv_eviction, made.backends = eviction, []
    made.runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=[]),
        req_states=SimpleNamespace(req_id_to_index=INDEX),
        model_state=SimpleNamespace(prepare_attn=lambda batch: None),
    )
    eviction._rows = (
        RowsV1(made.runner, ROWS, lambda row: False) if rows == "V1" else RowsV2(made.runner)
    )
    host = random_ragged(1, requests=ROWS, heads=HEADS, dim=SIZE, block_size=BLOCK)
    scales = (0.5, 0.25, 4.0) if fp8 else None
    for state in eviction.states.values():
        backend = Backend(kernel, host.to("cuda"), GROUP, ROWS, torch.float32, scales)
        scratch, device = backend.builder.buffers.scratch, state.tail_start.device
        backend.builder.buffers = GroupBuffers(state, scratch, device)
        backend.builder.binding = GroupBinding(eviction, state)
        made.backends.append(backend)
    return made


def outputs(policy, in_place):
    """Two requests evict; the store of one that ends is taken beside two that evict; a decode."""
    first, second = steps(policy, in_place)
    for group in first.evictions[1].groups:
        group.published = True
    first.rings, second.rings = {"a": 1, "b": 0}, {"c": 0, "a": 2}
    second.reused = {"d": [ReusedStore(0, 208, [63, 64, 65]), ReusedStore(1, 208, [66, 67])]}
    made = [step(new="ab"), step(new="cd", finished="b"), step(), step(preempted="d")]
    counts = [{"b": 4, "a": 1}, {"a": 1, "c": 3, "d": 2}, {"a": 1, "c": 1, "d": 1}, {"c": 2}]
    plans = [first, second, StepPlan(rings={"d": 1}), StepPlan(rings={"c": 0})]
    inputs = random_ragged(1, requests=ROWS).to("cuda")
    for output, tokens, plan in zip(made, counts, plans, strict=True):
        batch = Ragged(**vars(inputs))
        batch.seq_lens = batch.seq_lens[: len(tokens)]
        output.counts, output.common = tokens, common_of(batch, list(tokens.values()))
        setattr(output, PLAN, plan)
    return made


@pytest.mark.parametrize(
    ("kernel", "rows", "fp8", "in_place", "policy"),
    covering(
        [pytest.param("flash", "V1"), pytest.param("triton", "V2")],
        [pytest.param(False, id="float32"), pytest.param(True, id="fp8")],
        [pytest.param(False, id=""), pytest.param(True, id="in place")],
        ["snapkv", "ada-defensive", "probe"],
    ),
)
def test_steps_wait_for_nothing(policy, in_place, fp8, kernel, rows, monkeypatch):
    monkeypatch.setitem(extension._namespaces, "cuda", extension._namespaces["cpu"])
    monkeypatch.setattr(extension, "_load_installed", lambda: None)
    launched, measured, evicted = stub_launches(monkeypatch), [], []
    # Two requests in a launch, or one.
    longest = 512 if kernel == "flash" else 1
    with pretended(monkeypatch) as watch:
        fused = eviction_of(policy, True, SIZE, longest, "cuda", fp8, slots=BLOCKS)
        monkeypatch.setattr(fused, "_evict", None)
        worker = made(kernel, rows, fused, fp8)
        scheduled = outputs(policy, in_place)
        watch.waits.clear()
        for output in scheduled:
            assert worker.execute_model(output) is None
            measured.append(getattr(worker.sample_tokens(None), MEASURED, None))
            last = fused._rows.rows([*output.counts][-1:])
            evicted += [state.evicted[last].item() for state in fused.states.values()]
            if len(measured) == 2:
                watch.stream.finish()
        assert not watch.waits and launched
    assert fused.evictions == 4 and all(evicted) and len(evicted) == 8
    assert [found and len(found["seconds"]) for found in measured] == [None, None, 4, None]
    assert measured[2]["head_spread"][0] >= 1
