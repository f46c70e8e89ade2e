"""Workers with due evictions over random caches, for the emulated kernels and for a GPU alike."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.turned import Turned
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.ops.torch.probe import Network
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import floats_per_token
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import PLAN, Eviction, GroupEviction, StepPlan
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.fused import FusedEvictions
from vllm_kvevict.worker.gpu import interleaved
from vllm_kvevict.worker.probes import LayerProbe, Probes
from vllm_kvevict.worker.rotary import Rotary

BLOCK, HEADS, GROUP, SIZE, WINDOW, ROWS, BLOCKS = 16, 3, 2, 64, 8, 4, 120
GROUPS = {0: ["layer.0", "layer.2"], 1: ["layer.1"]}
NAMES = ["layer.0", "layer.1", "layer.2"]
UNITS = 24
"""Units of the networks of probes."""
ULPS = 4 * 2.0**-23
"""Difference of two scores over the largest score of the layer: 4 units in the last place."""
PROBES = ["probe", "ada-probe"]
FUSED = [
    "snapkv", "ada-snapkv", "pyramidkv", "ada-pyramid", "defensive", "ada-defensive", *PROBES
]  # fmt: skip
KINDS = [
    *(pytest.param(policy, False, id=policy) for policy in FUSED),
    *(pytest.param(policy, True, id=f"{policy} with networks") for policy in PROBES),
]
"""Policies that the kernels compute, and whether their probes have networks."""
ONE_OF_A_KIND = [
    one if one.id in ("snapkv", "ada-defensive", "probe", "ada-probe with networks")
    else pytest.param(*one.values, id=one.id, marks=pytest.mark.nightly)
    for one in KINDS
]  # fmt: skip
"""All of them, of which `make test` runs one for each way to score."""


def worker(
    policy: str,
    fused: bool,
    head_size: int = SIZE,
    longest: int = 512,
    device: str = "cpu",
    fp8: bool = False,
    slots: int = 0,
    shares: bool = False,
    probe_window: str = "auto",
    dims: int = SIZE,
    neox: bool = True,
    allow: str = "",
    networks: bool = False,
    stored: TokenFormat = AS_CACHED,
) -> WorkerEviction:
    """A worker of three layers in two groups; the same numbers in each.

    ``fp8`` makes the caches FP8 with scales other than 1; ``shares`` gives heads fixed shares.
    ``dims`` of the keys are rotated, except in layer.2, and ``neox`` says which belong together.
    ``networks`` adds a small network to every probe; ``stored`` is the format of stores.
    """
    torch.manual_seed(0)
    where = torch.device(device)
    # As a worker makes it at start-up.
    stored.rotation(head_size, torch.empty(0, device=where).device)
    config = EvictionConfig(
        policy=policy,
        window=WINDOW,
        budget=WINDOW + 4 * BLOCK,
        options=dict(probe_window=probe_window) if "probe" in policy else {},
        **(dict(allow=allow) if allow else {}),
    )
    rule = EvictionRule(
        BLOCK,
        WINDOW,
        4 * BLOCK,
        budget_tokens=WINDOW + 4 * BLOCK,
        page_tokens=stored.page_tokens(BLOCK),
    )
    states = {
        id_: GroupState(id_, names, rule, HEADS, ROWS, 512, where, slots)
        for id_, names in GROUPS.items()
    }
    for state in states.values():
        state.head_indptr[..., 1:].fill_(777)  # what another request left behind
    layout = interleaved(BLOCK, head_size)
    caches = {
        name: LayerCache(
            pages(BLOCKS * HEADS, 2 * BLOCK * head_size, fp8).to(where),
            layout,
            head_size**-0.5,
            0.0,
            token_format=stored,
            centres=None if stored.as_cached else 2 * torch.randn(HEADS, head_size).to(where),
            **(dict(query_scale=0.5, key_scale=0.25, value_scale=4.0) if fp8 else {}),
        )
        for name in NAMES
    }
    rings = ObservationRings(NAMES, 3, WINDOW, HEADS * GROUP, head_size, torch.float32, where)
    rings._queries.copy_(torch.randn(rings._queries.shape))
    rows = SimpleNamespace(
        rows=lambda ids: np.array([ROWS - 1 - "abc".index(i) for i in ids]),
        begin_step=lambda output: [],
        positions=lambda request, start, stop: torch.arange(start, stop, device="cpu"),
    )
    policies = build_policies(config)
    channels = floats_per_token(config)
    values = TokenStats(caches, dict.fromkeys(NAMES, HEADS), channels) if channels else None
    probes = None
    if policy in PROBES:
        assert values is not None
        layers = layer_probes(
            policies[policy].requirements.floats_per_token, head_size, dims, neox, where, networks
        )
        probes = Probes(layers, caches, values)
        rings = rings if probe_window == "auto" else None
    kernels = None
    if fused:
        kernels = FusedEvictions(policies, states, caches, rings, values, longest, probes)
    of_heads = {id_: head_shares(len(names), where) for id_, names in GROUPS.items()}
    given = of_heads if shares else None
    return WorkerEviction(policies, states, caches, rings, values, rows, kernels, given, probes)


def layer_probes(
    channels: int,
    size: int,
    dims: int,
    neox: bool,
    device: torch.device,
    networks: bool = False,
) -> dict[str, LayerProbe]:
    """Random probes; layers of the same group with rotary modules of their own, or none."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for index, name in enumerate(NAMES):
        module = Turned(size, dims, neox, 50.0 + index, device) if name != "layer.2" else None
        rotary = None if module is None else Rotary(module)

        def drawn(age: torch.Tensor | None, rotary: Rotary | None = rotary) -> LayerProbe:
            weights = torch.randn(HEADS, channels, size + 2, generator=generator)
            window = torch.rand(HEADS, generator=generator)
            return LayerProbe(weights.to(device), age, window.to(device), rotary)

        age = torch.randn(HEADS, channels, 2, generator=generator).to(device)
        made[name] = replace(drawn(None), prose=drawn(age))
        if networks:
            hidden = torch.randn(HEADS, UNITS, size + 3, generator=generator) / 8
            out = torch.randn(HEADS, UNITS + 1, generator=generator)
            network = Network.of(hidden.to(device), out.to(device))
            made[name] = replace(made[name], network=network)
    return made


def head_shares(layers: int, device: torch.device) -> torch.Tensor:
    """[L, H] float64 shares of mean 1, other ones in each layer."""
    drawn = torch.arange(1, 1 + layers * HEADS, dtype=torch.float64).view(layers, HEADS) ** 2
    return (drawn / drawn.mean(-1, keepdim=True)).to(device)


def pages(count: int, size: int, fp8: bool) -> torch.Tensor:
    """[count, size] random elements, float32 or FP8 in uint8."""
    elements = torch.randn(count, size)
    return (8 * elements).to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else elements


def due(old: list[int], store: list[int], start: int, end: int, first: int) -> GroupEviction:
    """An eviction over positional blocks from ``start`` to ``end`` (in blocks), and a window."""
    own = {*old, *range(first, first + end - start)}
    return GroupEviction(
        group_id=0,
        old_tail_start=start * BLOCK,
        tail_start=end * BLOCK,
        old_store=old,
        positional=list(range(first, first + end - start + 2)),
        store=store,
        reused=len(own & set(store)),
    )


def steps(policy: str, in_place: bool = False) -> list[StepPlan]:
    """Two requests after their prefill in one step, then one again beside a third.

    ``in_place`` moves three of the four into blocks of their own, or into some and fresh ones.
    """
    first, other = ([5, 60], [9, 10, 11]) if in_place else ([60, 61], [62, 76, 77])

    def both(request, tokens, ring, group, other, protect=0):
        other.group_id = 1
        # Prose counts fully, half, and not at all.
        share = {"a": 0.5, "b": 0.15, "c": 0.01}[request]
        return Eviction(request, tokens, ring, [group, other], policy, protect, share=share)

    a = both("a", 102, 1, due([], first, 0, 5, 1), due([], other, 0, 5, 8), protect=3)
    b = both("b", 230, 0, due([], [63, 64, 65], 0, 13, 15), due([], [66, 67], 0, 13, 30))
    second, third = ([60, 46, 5], [9, 71, 72]) if in_place else ([68, 69, 70], [71, 72, 78])
    last = [81] if in_place else [73]
    again = both("a", 150, 2, due(first, second, 5, 8, 45), due(other, third, 5, 8, 50), protect=3)
    c = both("c", 75, 0, due([], last, 0, 4, 80), due([], [74, 75], 0, 4, 86))
    return [StepPlan(evictions=[a, b]), StepPlan(evictions=[again, c])]


def stored_steps(policy: str, in_place: bool = False) -> list[StepPlan]:
    """As :func:`steps`, with tails that fill the pages of stores in few bits."""

    def both(request, tokens, ring, group, other, protect=0):
        other.group_id = 1
        share = {"a": 0.5, "b": 0.15, "c": 0.01}[request]
        return Eviction(request, tokens, ring, [group, other], policy, protect, share=share)

    a = both("a", 9 * BLOCK + 22, 1, due([], [60, 61], 0, 9, 1), due([], [62], 0, 9, 12), protect=3)
    last = [26, 28] if in_place else [63, 64]
    b = both("b", 13 * BLOCK + 20, 0, due([], last, 0, 13, 25), due([], [65], 0, 13, 42))
    second = [61, 90, 60] if in_place else [68, 69, 70]
    again = both(
        "a",
        15 * BLOCK + 20,
        2,
        due([60, 61], second, 9, 15, 90),
        due([62], [71, 72], 9, 15, 100),
        protect=3,
    )
    c = both("c", 5 * BLOCK + 10, 0, due([], [73], 0, 5, 76), due([], [74], 0, 5, 83))
    return [StepPlan(evictions=[a, b]), StepPlan(evictions=[again, c])]


def run(made: WorkerEviction, plans: list[StepPlan]) -> None:
    """The steps, with no forward pass in them."""
    new = [SimpleNamespace(req_id=id_, prompt_token_ids=[ord(id_)]) for id_ in "abc"]
    for plan in plans:
        made.begin_step(
            SimpleNamespace(**{PLAN: plan}, finished_req_ids=(), scheduled_new_reqs=new)
        )
        made.end_step(None)
        made.evict()


def assert_same(mine: WorkerEviction, other: WorkerEviction, off: float = 0.0) -> None:
    """Both workers hold the same caches and tables, bit by bit, and floats within rounding.

    ``off`` is the share of bytes that may differ: stored levels next to one another, where sums in
    another order are on the other side of the middle.

    Shares are in [0, 1]. A probe's score is a sum of D products that kernels add in another order.
    The difference follows from the largest partial sums and not from the score, which may be near
    0, so the bound is :data:`ULPS` of the largest score of a layer. FP8 keys are twice as large
    here, and 128 dimensions are more than 64: their scores reach 177, and another order alone used
    0.9 of the former bound of 1e-5 on a CPU. Two cases of ``ada-probe`` with these sizes failed on
    an H100. Their selections are no near-ties, because noise of 1e-4 of each score changes no kept
    token, so that bound is what failed by all that a CPU shows.
    """
    for name in NAMES:
        ours, theirs = (one.cache(name).pages.cpu().view(torch.uint8) for one in (mine, other))
        assert float((ours != theirs).float().mean()) <= off
        if mine.token_stats is not None:
            assert other.token_stats is not None
            ours, theirs = mine.token_stats.layer(name), other.token_stats.layer(name)
            close = 1e-7
            if mine._reader.probes is not None:
                close = max(1e-5, ULPS * float(theirs.abs().max()))
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-5, atol=close)
            assert bool(ours.any())
    for id_, state in mine.states.items():
        for table in ("tail_start", "stores", "head_indptr", "evicted", "store"):
            ours, theirs = getattr(state, table), getattr(other.states[id_], table)
            assert torch.equal(ours.cpu(), theirs.cpu()), table
