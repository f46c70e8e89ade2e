"""Evictions by the CUDA operations, emulated on the CPU, against those of PyTorch operations."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulation.build import NAMESPACE
from tests.kernels import evict
from tests.kernels.evict import (
    BLOCK,
    FUSED,
    GROUP,
    HEADS,
    KINDS,
    ONE_OF_A_KIND,
    PROBES,
    ROWS,
    WINDOW,
    assert_same,
    run,
    steps,
    stored_steps,
    worker,
)
from tests.nightly import covering, some
from tests.turned import Turned
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.ops.cuda.batch import Due
from vllm_kvevict.ops.token_format import INT4, INT8
from vllm_kvevict.ops.torch import probe
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import workspace
from vllm_kvevict.worker.fused import launches, obstacle
from vllm_kvevict.worker.fused_probes import GroupProbes
from vllm_kvevict.worker.rotary import Rotary
from vllm_kvevict.worker.workspace import EvictionSizes

pytestmark = pytest.mark.usefixtures("one_rank")

FP8 = [pytest.param(False, id="float32"), pytest.param(True, id="fp8")]
WAYS = [
    pytest.param(512, False, id="together"),
    pytest.param(1, True, id="one by one, in place"),
    pytest.param(512, True, id="together, in place", marks=pytest.mark.nightly),
    pytest.param(1, False, id="one by one", marks=pytest.mark.nightly),
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "networks", "longest", "in_place", "fp8"), covering(KINDS, WAYS, FP8)
)
def test_same_caches_and_tables_as_the_reference(
    policy, networks, longest, fp8, in_place, monkeypatch
):
    plain = worker(policy, fused=False, fp8=fp8, networks=networks)
    fused = worker(policy, fused=True, longest=longest, fp8=fp8, networks=networks)

    def never(*arguments):
        raise AssertionError("this eviction should have been fused")

    monkeypatch.setattr(fused, "_evict", never)
    plans = steps(policy, in_place)
    run(plain, plans)
    run(fused, plans)
    assert fused.evictions == plain.evictions == 4
    assert_same(fused, plain)
    splits = [state.head_indptr[:, 1:].diff(dim=-1) for state in fused.states.values()]
    uneven = any(bool((split[..., :1] != split).any()) for split in splits)
    assert uneven == policy.startswith("ada-")
    measured = fused.meter.take()
    assert len(measured["seconds"]) == 4 and len(measured["head_spread"]) == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "networks", "in_place", "stored"),
    covering(KINDS, [False, True], [pytest.param(INT4, id="int4"), pytest.param(INT8, id="int8")]),
)
def test_stores_in_few_bits(policy, networks, in_place, stored, monkeypatch):
    """Survivors are packed, scored again from the store, and moved as they are."""
    plain = worker(policy, fused=False, networks=networks, stored=stored)
    fused = worker(policy, fused=True, networks=networks, stored=stored)
    monkeypatch.setattr(fused, "_evict", None)
    plans = stored_steps(policy, in_place)
    run(plain, plans)
    run(fused, plans)
    assert fused.evictions == plain.evictions == 4
    assert_same(fused, plain, off=1e-4)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("policy", PROBES)
def test_long_fp8_keys(policy):
    """What the GPU's test compares, with the largest scores."""
    options = dict(head_size=128, fp8=True)
    plain, fused = worker(policy, fused=False, **options), worker(policy, fused=True, **options)
    run(plain, steps(policy))
    run(fused, steps(policy))
    assert_same(fused, plain)


@pytest.mark.parametrize("policy", PROBES)
def test_sums_of_another_order_are_the_same_and_a_wrong_score_is_not(policy, monkeypatch):
    real, options = probe.key_scores, dict(fused=False, head_size=128, fp8=True)
    plain, other = worker(policy, **options), worker(policy, **options)
    run(plain, steps(policy))

    def backwards(keys, rotation, weights):
        turned, (parts, rest) = probe.unrotated(keys, rotation), weights.split([128, 2], dim=-1)
        return real(turned.flip(-1), None, torch.cat([parts.flip(-1), rest], dim=-1))

    monkeypatch.setattr(probe, "key_scores", backwards)
    run(other, steps(policy))
    pairs = [(plain.token_stats.layer(name), other.token_stats.layer(name)) for name in evict.NAMES]
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)
    assert_same(other, plain)
    kept = other.token_stats.layer("layer.1")
    kept.view(-1)[kept.flatten().abs().argmin()] += 1e-3
    with pytest.raises(AssertionError):
        assert_same(other, plain)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "longest"), covering(["snapkv", "ada-snapkv", "defensive", "pyramidkv"], [512, 1])
)
def test_heads_keep_fixed_shares(policy, longest, monkeypatch):
    """Where their policy follows them: by the kernels, and as by the PyTorch operations."""
    plain = worker(policy, fused=False, shares=True)
    fused = worker(policy, fused=True, longest=longest, shares=True)
    monkeypatch.setattr(fused, "_evict", None)
    with Operations() as used:
        run(fused, steps(policy, in_place=True))
    run(plain, steps(policy, in_place=True))
    assert fused.evictions == 4
    assert_same(fused, plain)
    follows = policy in ("snapkv", "defensive")
    assert (f"{NAMESPACE}::allocate_shares" in used.names) == follows
    if follows:
        steep = fused.states[1].head_indptr[0, ROWS - 1].diff().tolist()
        assert steep[0] < steep[1] < steep[2]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("window", "dims", "neox", "fp8"),
    covering(
        ["now and then", "auto", "none"],
        [pytest.param(64, False), pytest.param(32, True), pytest.param(16, False)],
        FP8,
    ),
)
def test_probes_take_rotations_out(window, dims, neox, fp8, monkeypatch):
    """All dimensions or some, in halves or neighbours; with a window, without, or where it is."""
    options = dict(dims=dims, neox=neox, fp8=fp8, shares=True)
    options |= dict(probe_window="none" if window == "none" else "auto")
    plain, fused = (worker("probe", fused=one, **options) for one in (False, True))
    monkeypatch.setattr(fused, "_evict", None)
    plans = steps("probe", in_place=True)
    if window == "now and then":
        # The first of one request, and the second of another, which was scored with a window.
        plans[0].evictions[1].ring = plans[1].evictions[0].ring = None
    run(plain, plans)
    run(fused, plans)
    assert fused.evictions == 4
    assert_same(fused, plain)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("policy", ["probe", "defensive"])
def test_two_policies_keep_numbers_in_the_same_place(policy, monkeypatch):
    plain, fused = (worker("probe", fused=one, allow="defensive") for one in (False, True))
    monkeypatch.setattr(fused, "_evict", None)
    run(plain, steps(policy))
    run(fused, steps(policy))
    assert fused.evictions == 4
    assert_same(fused, plain)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("problem", ["sections", "no table", "other angles", "pairs"])
def test_rotations_that_the_kernels_do_not_know(problem, monkeypatch):
    """The PyTorch operations take these evictions, and the module's own code the rotation."""
    if problem == "sections":
        monkeypatch.setattr(Turned, "mrope_section", [16, 8, 8], raising=False)
    if problem == "no table":
        monkeypatch.setattr(Rotary, "table", lambda rotary, longest: None)
    if problem == "other angles":
        turn = Turned.forward_native
        monkeypatch.setattr(
            Turned, "forward_native", lambda self, at, q, k: turn(self, at // 2, q, k)
        )
    dims = 12 if problem == "pairs" else 64
    made = worker("probe", fused=True, allow="snapkv", dims=dims, fp8=problem == "pairs")
    assert not made._fused.takes("probe") and made._fused.takes("snapkv")
    run(made, steps("probe"))
    assert made.evictions == 4


class Operations(TorchDispatchMode):
    """Names of our operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names |= {func.name()} if func.name().startswith(NAMESPACE) else set()
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("window", "fp8"), covering(["auto", "none", "now and then"], FP8))
def test_networks_run_on_the_kernels(window, fp8, monkeypatch):
    """Networks change what is kept, with a window, without one, and under keys alone."""
    options = dict(fp8=fp8, probe_window="none" if window == "none" else "auto")
    linear = worker("probe", fused=True, **options)
    options["networks"] = True
    plain, fused = (worker("probe", fused=one, **options) for one in (False, True))
    assert fused._fused.takes("probe")
    monkeypatch.setattr(fused, "_evict", None)
    plans = steps("probe", in_place=True)
    if window == "now and then":
        plans[0].evictions[1].ring = plans[1].evictions[0].ring = None
    with Operations() as used:
        run(fused, plans)
    run(plain, plans)
    run(linear, plans)
    assert fused.evictions == 4
    assert_same(fused, plain)
    assert f"{NAMESPACE}::probe_networks" in used.names
    assert not torch.equal(fused.cache("layer.0").pages, linear.cache("layer.0").pages)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("policy", "networks", "shares"),
    covering(ONE_OF_A_KIND, [pytest.param(True, id="shares"), pytest.param(False, id="")]),
)
def test_the_warm_up_runs_what_evictions_run(policy, networks, shares):
    made = worker(policy, fused=True, shares=shares, networks=networks)
    with Operations() as warm:
        made.warm_up()
    for state in made.states.values():
        assert not state.evicted.any() and not state.tail_start.any()
    with Operations() as served:
        run(made, steps(policy, in_place=True))
    assert warm.names == served.names and len(warm.names) > 4


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("policy", some(PROBES, "probe"))
def test_the_warm_up_loads_the_kernels_of_probes_with_prose_and_without(policy, monkeypatch):
    """Which of them a launch takes follows from the probes of a head."""
    made, seen, layers = worker(policy, fused=True), [], GroupProbes.layers

    def noted(self, *args):
        seen.append(self.weights.shape[2])
        return layers(self, *args)

    monkeypatch.setattr(GroupProbes, "layers", noted)
    made.warm_up()
    warm = set(seen)
    seen.clear()
    run(made, steps(policy))
    assert warm == set(seen) == {2, 4}


@pytest.mark.usefixtures("emulated")
def test_a_pool_too_small_to_warm_up_in_is_left_alone(monkeypatch):
    monkeypatch.setattr(evict, "BLOCKS", 3)
    made = worker("snapkv", fused=True)
    with Operations() as warm:
        made.warm_up()
    assert not warm.names


@pytest.mark.usefixtures("emulated")
def test_one_head_has_all_pages_unsorted(monkeypatch):
    monkeypatch.setattr(evict, "HEADS", 1)
    made, plain = worker("ada-snapkv", fused=True), worker("ada-snapkv", fused=False)
    with Operations() as used:
        run(made, steps("ada-snapkv"))
    run(plain, steps("ada-snapkv"))
    assert_same(made, plain)
    assert f"{NAMESPACE}::select" in used.names and f"{NAMESPACE}::allocate" not in used.names


@pytest.mark.usefixtures("emulated")
def test_other_policies_and_listeners_take_the_pytorch_operations(monkeypatch):
    for policy in sorted(set(POLICY_NAMES) - set(FUSED)):
        assert not worker(policy, fused=True)._fused.takes(policy)
    made, records = worker("snapkv", fused=True), []
    made.listeners.append(records.append)
    run(made, steps("snapkv"))
    assert len(records) == 8 and made.evictions == 4


@pytest.mark.usefixtures("emulated")
def test_workspace_is_no_larger_than_said(monkeypatch):
    """Everything that a launch allocates, which is more than is alive at once."""
    longest, sizes = 230, []
    monkeypatch.setattr(workspace, "STAGING_BYTES", 0)
    of_two_layers = EvictionSizes(2, HEADS, GROUP * WINDOW, 1, BLOCK, slot_bytes=8)
    said = of_two_layers.kernel_bytes(2, longest)
    made = worker("ada-snapkv", fused=True, longest=longest)
    plain_empty = torch.empty

    def counted(*arguments, **options):
        tensor = plain_empty(*arguments, **options)
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    monkeypatch.setattr(torch, "empty_like", lambda like, **o: counted(
        like.shape, dtype=o.get("dtype", like.dtype)))  # fmt: skip
    for eviction in steps("ada-snapkv")[0].evictions:
        sizes.clear()
        eviction.groups = eviction.groups[:1]
        made._fused.run("ada-snapkv", [eviction], [0])
        assert sum(sizes) <= said
    assert sum(sizes) > said / 2


def test_launches_hold_no_more_than_one_long_request():
    draw = random.Random(0)
    tokens = [draw.randint(1, 40) for _ in range(200)]
    made = [Due(0, 0, n, 0, 0, 0, [], []) for n in tokens]
    found = list(launches(made, 100))
    assert [one for launch in found for one in launch] == made
    for launch in found:
        assert len(launch) == 1 or len(launch) * max(one.num_tokens for one in launch) <= 100
    assert max(map(len, found)) > 2
    assert list(launches(made, 1)) == [[one] for one in made]


def test_what_the_kernels_do_not_serve_is_named(monkeypatch):
    made = worker("snapkv", fused=False, head_size=48)
    problem = obstacle(made.states, made._caches, made.rings)
    assert "head size 48" in problem
    with pytest.raises(ValueError, match="head size 48"):
        worker("snapkv", fused=True, head_size=48)
    good = worker("snapkv", fused=False)
    assert obstacle(good.states, good._caches, good.rings) is None
    half = {n: LayerCache(c.pages.half(), c.layout, c.scale, 0) for n, c in good._caches.items()}
    assert "neither FP8 nor" in obstacle(good.states, half, good.rings)
    some = dict(good._caches) | {"layer.2": worker("snapkv", False, fp8=True).cache("layer.2")}
    assert "in every layer" in obstacle(good.states, some, good.rings)
    capped = dict(good._caches)
    capped["layer.2"] = LayerCache(
        capped["layer.2"].pages, capped["layer.2"].layout, capped["layer.2"].scale, 30.0
    )
    assert "soft caps" in obstacle(good.states, capped, good.rings)
    sinks = {n: replace(c, sinks=torch.zeros(2, 2)) for n, c in good._caches.items()}
    assert "attention sinks" in obstacle(good.states, sinks, good.rings)
    monkeypatch.setattr(fused_pass, "MAX_LAYERS", 1)
    assert "2 layers" in obstacle(good.states, good._caches, good.rings)
