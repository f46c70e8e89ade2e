"""Evictions run in memory that was allocated at start-up, and its size is what start-up says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.evict import (
    BLOCK,
    GROUP,
    HEADS,
    ONE_OF_A_KIND,
    SIZE,
    WINDOW,
    assert_same,
    run,
    steps,
    stored_steps,
    worker,
)
from tests.meta_eviction import Operations
from tests.meta_eviction import worker as meta_worker
from tests.nightly import covering
from tests.pretend_gpu import pretended, upload_as_on_a_gpu
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.ops.cuda import pages as compaction
from vllm_kvevict.ops.token_format import AS_CACHED, INT4
from vllm_kvevict.rules.step_plan import PLAN
from vllm_kvevict.worker import workspace as sizing
from vllm_kvevict.worker.workspace import (
    EvictionSizes,
    Workspace,
    pytorch_bytes,
    workspace_bytes,
)

pytestmark = pytest.mark.usefixtures("one_rank")

LLAMA = EvictionSizes(32, 8, 4 * 32, 128, 16, 512)
"""Llama-3.1-8B in bfloat16, with one float per token less."""


@pytest.fixture(autouse=True)
def upload_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another test in this process leaves that of vLLM's CPU runner in its place."""
    upload_as_on_a_gpu(monkeypatch)


def mine(policy: str, made: int = 0) -> tuple[EvictionConfig, EvictionSizes]:
    config = EvictionConfig(policy=policy)
    return config, EvictionSizes(
        len(NAMES_OF_A_GROUP), HEADS, GROUP * WINDOW, SIZE, BLOCK, 2 * SIZE * 4, made
    )


NAMES_OF_A_GROUP = ["layer.0", "layer.2"]
BY_WINDOW = [
    *(
        pytest.param(*kind.values, "auto", AS_CACHED, id=kind.id, marks=kind.marks)
        for kind in ONE_OF_A_KIND
    ),
    pytest.param("probe", True, "none", AS_CACHED, id="probe with networks, by keys alone"),
    pytest.param("snapkv", False, "auto", INT4, id="snapkv in few bits"),
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "networks", "probe_window", "stored", "fused"),
    covering(BY_WINDOW, [pytest.param(False, id="pytorch"), pytest.param(True, id="kernels")]),
)
def test_nothing_is_allocated_while_serving(
    policy, networks, probe_window, stored, fused, monkeypatch
):
    """Not by the driver; and what the pool holds is at most what was allocated at start-up."""
    monkeypatch.setitem(extension._namespaces, "cuda", extension._namespaces["cpu"])
    monkeypatch.setattr(extension, "_load_installed", lambda: None)
    for module in (sizing, compaction):
        # Otherwise the staging buffer of evictions in place outweighs everything else here.
        monkeypatch.setattr(module, "STAGING_BYTES", 1)
    config, sizes = mine(policy, made=2 if probe_window == "auto" else 1)
    options = dict(networks=networks, probe_window=probe_window, stored=stored)
    plans = (steps if stored.as_cached else stored_steps)(policy, in_place=True)
    longest = max(eviction.num_tokens for plan in plans for eviction in plan.evictions)
    said = workspace_bytes(config, sizes, longest, kernels=fused)
    plain = worker(policy, fused=False, **options)
    run(plain, plans)
    with pretended(monkeypatch) as watch:
        made = worker(policy, fused=fused, device="cuda", **options)
        made._workspace = Workspace(said, torch.device("cuda"))
        assert watch.memory.peak == said + sizing.SMALL_COUNT * sizing.SMALL_BYTES
        made._workspace.open()
        assert watch.memory.live == 0
        watch.memory.peak = 0
        first, second = plans
        made.begin_step(step(first))
        watch.memory.outside.clear()
        made.end_step(None)
        made.evict()
        outside = watch.memory.outside.copy()
        made.begin_step(step(second))
        watch.memory.outside.clear()
        made.end_step(None)
        made.evict()
        assert made.evictions == 4
        assert not outside and not watch.memory.outside
        assert said / 10 < watch.memory.peak <= said + 2**16, "and small tables"
        watch.memory.live = 0
    assert_same(made, plain, off=0.0 if stored.as_cached else 1e-3)


def step(plan):
    return SimpleNamespace(**{PLAN: plan})


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "networks", "in_place"),
    covering(ONE_OF_A_KIND, [pytest.param(False, id=""), pytest.param(True, id="in place")]),
)
def test_long_evictions_go_through_in_pieces(policy, networks, in_place, monkeypatch):
    """A workspace for one layer of one request, by layers that keep shares of their own."""
    plain = worker(policy, fused=False, shares=True, networks=networks)
    made = worker(policy, fused=True, shares=True, networks=networks)
    sizes = made._fused._groups[0].sizes
    made._fused._workspace = sizes.kernel_bytes(1, 102)
    launched = []
    evict = made._fused._evict

    def counted(policy, group, due, *arguments):
        launched.append((len(group.caches), [eviction.num_tokens for eviction in due]))
        return evict(policy, group, due, *arguments)

    monkeypatch.setattr(made._fused, "_evict", counted)
    plans = steps(policy, in_place)
    run(plain, plans)
    run(made, plans)
    assert made.evictions == 4
    assert_same(made, plain)
    # Group 0 has two layers and group 1 one; all four evictions run in each, one by one.
    assert len(launched) == 4 * 3 and all(layers == 1 for layers, _ in launched)
    assert all(len(tokens) == 1 for _, tokens in launched)


@pytest.mark.parametrize("tokens", [100, 8192, 32768, 131072, 1_000_000])
def test_layers_at_once_fit(tokens):
    for sizes in (LLAMA, replace(LLAMA, made=2), replace(LLAMA, heads=1), replace(LLAMA, layers=1)):
        num_bytes = sizes.kernel_workspace(tokens)
        count = sizes.layers_at_once(tokens, num_bytes)
        assert sizes.kernel_bytes(count, tokens) <= num_bytes
        assert count == sizes.layers or sizes.kernel_bytes(count + 1, tokens) > num_bytes
        fit = sizes.tokens_at_once(tokens, num_bytes)
        assert sizes.layers_at_once(fit, num_bytes) == sizes.layers
        assert fit == tokens or sizes.layers_at_once(fit + 1, num_bytes) < sizes.layers
        assert num_bytes <= max(sizing.KERNEL_BYTES, 1.25 * sizes.kernel_bytes(1, tokens))
        assert num_bytes <= sizes.kernel_bytes(sizes.layers, tokens)
    assert LLAMA.layers_at_once(tokens, LLAMA.kernel_workspace(tokens)) > 8


MIXING = ["tova", "nacl"]


@pytest.mark.parametrize(
    ("policy", "heads", "tokens", "stored"),
    [
        *covering(
            ["ada-probe", "ada-defensive", "ada-snapkv", "scissorhands", "subgen", *MIXING],
            [8, 1],
            [8192, 131072, 512],
            [pytest.param(AS_CACHED, id="as cached")],
        ),
        *covering(["ada-snapkv"], [8, 1], [8192, 131072, 1024], [pytest.param(INT4, id="int4")]),
    ],
)
def test_pytorch_operations_hold_no_more_than_is_said(policy, heads, tokens, stored):
    made, eviction = meta_worker(policy, num_tokens=tokens, heads=heads, stored=stored)
    config = EvictionConfig(policy=policy)
    sizes = EvictionSizes(32, heads, 4 * 32, 128, 16, 512, 2 * ("probe" in policy))
    said = pytorch_bytes(config, sizes, tokens)
    with Operations() as used:
        made._evict(eviction)
    assert used.peak <= said < 1200 * 2**20
    # Policies that mix heads differ in what they compute; their bound is that of the largest.
    assert policy in MIXING or used.peak > said / 8


def test_the_workspace_is_the_larger_one_where_both_kinds_run():
    alone, mixed = EvictionConfig(policy="snapkv"), EvictionConfig(policy="snapkv", allow="tova")
    kernels = LLAMA.kernel_workspace(32768)
    assert workspace_bytes(alone, LLAMA, 32768, kernels=True) == kernels
    by_pytorch = pytorch_bytes(mixed, LLAMA, 32768)
    assert workspace_bytes(mixed, LLAMA, 32768, kernels=True) == max(kernels, by_pytorch)
    assert workspace_bytes(mixed, LLAMA, 32768, kernels=False) == by_pytorch
    assert pytorch_bytes(alone, LLAMA, 32768) < by_pytorch


def test_a_workspace_grows_once_and_holds_nothing_on_a_cpu(monkeypatch):
    made = Workspace(10**12, torch.device("cpu"))
    with made.use():
        assert made.num_bytes == 10**12
    with pretended(monkeypatch) as watch:
        made = Workspace(1000, torch.device("cuda"))
        held = watch.memory.live
        made.extend(500)
        assert watch.memory.live == held and made.num_bytes == 1000
        made.extend(3000)
        assert watch.memory.live == held + 3000 and made.num_bytes == 3000


def test_a_workspace_follows_the_stream(monkeypatch):
    """torch reuses the memory of a pool on the stream of its allocation only."""
    with pretended(monkeypatch) as watch:
        made = Workspace(1000, torch.device("cuda"))
        made.open()
        first = made._pool
        with made.use():
            assert made._pool is first and watch.memory.live == 0
        other = object()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: other)
        watch.memory.peak = 0
        with made.use():
            assert made._pool is not first
        held = 1000 + sizing.SMALL_COUNT * sizing.SMALL_BYTES
        assert watch.memory.peak == held and watch.memory.live == 0
        second, watch.memory.peak = made._pool, 0
        with made.use():
            assert made._pool is second and watch.memory.peak == 0
