"""Evictions by PyTorch operations on a GPU: many heads at once, with the results of one layer."""

from zlib import crc32

import pytest
import torch

from tests.kernels.evict import FUSED, SIZE, assert_same, run, steps, stored_steps, worker
from tests.meta_eviction import Operations
from tests.meta_eviction import worker as meta_worker
from tests.nightly import covering, nightly
from tests.pretend_gpu import pretended, upload_as_on_a_gpu
from vllm_kvevict.ops import pieces
from vllm_kvevict.ops.token_format import AS_CACHED, INT4, INT8
from vllm_kvevict.ops.torch import score
from vllm_kvevict.policies import subgen
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.tova import TOVA
from vllm_kvevict.worker.candidates import CandidateReader

pytestmark = pytest.mark.usefixtures("one_rank")

OTHERS = [
    "streaming-llm", "tova", "ada-tova", "scissorhands", "ada-scissorhands", "nacl", "subgen"
]  # fmt: skip
SIZES = {
    "all at once": (2**24, 2**21),
    "some heads, some layers": (2 * 230 * 64, 2 * 230 * 3),
    "one head, one layer": (1, 1),
}
"""Numbers in memory at once, and columns of the layers that are evicted together."""


@pytest.fixture(autouse=True)
def upload_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another test in this process leaves that of vLLM's CPU runner in its place."""
    upload_as_on_a_gpu(monkeypatch)


@pytest.fixture(autouse=True)
def one_layer_at_a_time_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results on the CPU are those that others are compared with."""
    monkeypatch.setattr(pieces, "FLOATS", 1)


@pytest.mark.parametrize(
    ("policy", "numbers", "columns", "fp8"),
    covering(
        [*FUSED, *OTHERS],
        [pytest.param(*SIZES[name], id=name) for name in reversed(SIZES)],
        [pytest.param(False, id="float32"), pytest.param(True, id="fp8")],
    ),
)
def test_the_result_is_that_of_one_layer_at_a_time(policy, fp8, numbers, columns, monkeypatch):
    plain, plans = worker(policy, fused=False, fp8=fp8), steps(policy, in_place=True)
    run(plain, plans)
    monkeypatch.setattr(score, "DEVICE_LOGITS", numbers)
    monkeypatch.setattr(pieces, "COLUMNS", columns)
    with pretended(monkeypatch):
        made = worker(policy, fused=False, device="cuda", fp8=fp8)
        run(made, plans)
    assert made.evictions == plain.evictions == 4
    assert_same(made, plain)


@pytest.mark.parametrize("stored", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("numbers", [2 * SIZE * 100, 2**24])
def test_survivors_are_packed_in_pieces(numbers, stored, monkeypatch):
    """A few levels differ where an element lies between two, as sums are in another order."""
    plans = stored_steps("ada-defensive", in_place=True)
    plain = worker("ada-defensive", fused=False, stored=stored)
    run(plain, plans)
    monkeypatch.setattr(score, "DEVICE_LOGITS", numbers)
    with pretended(monkeypatch):
        made = worker("ada-defensive", fused=False, device="cuda", stored=stored)
        run(made, plans)
    assert made.evictions == plain.evictions == 4
    assert_same(made, plain, off=1e-4)


@pytest.mark.parametrize(
    ("numbers", "columns", "window"),
    covering([pytest.param(*size, id=name) for name, size in SIZES.items()], ["auto", "none"]),
)
def test_networks_of_several_layers_are_evaluated_together(window, numbers, columns, monkeypatch):
    options = dict(fused=False, networks=True, probe_window=window)
    plain, plans = worker("probe", **options), steps("probe")
    run(plain, plans)
    other = worker("probe", fused=False, probe_window=window)
    run(other, plans)
    assert not torch.equal(plain.cache("layer.0").pages, other.cache("layer.0").pages)
    monkeypatch.setattr(score, "DEVICE_LOGITS", numbers)
    monkeypatch.setattr(pieces, "COLUMNS", columns)
    with pretended(monkeypatch):
        made = worker("probe", device="cuda", **options)
        run(made, plans)
    assert_same(made, plain)


@pytest.mark.parametrize("policy", ["snapkv", "defensive"])
def test_measured_shares_divide_the_pages(policy, monkeypatch):
    plain, plans = worker(policy, fused=False, shares=True), steps(policy)
    run(plain, plans)
    monkeypatch.setattr(pieces, "COLUMNS", 1)
    with pretended(monkeypatch):
        made = worker(policy, fused=False, device="cuda", shares=True)
        run(made, plans)
    assert_same(made, plain)
    split = made.states[0].head_indptr[:, 2].diff(dim=-1)
    assert bool((split[0] != split[1]).any()), "each layer has its own shares"


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        *((policy, AS_CACHED) for policy in [*FUSED, *OTHERS]),
        ("ada-snapkv", INT4),
        *(nightly(policy, INT4) for policy in [*FUSED, *OTHERS] if policy != "ada-snapkv"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_host_waits_for_the_width_of_a_store_and_nothing_else(policy, stored, monkeypatch):
    with pretended(monkeypatch) as watch:
        made = worker(policy, fused=False, device="cuda", stored=stored)
        first, second = (steps if stored.as_cached else stored_steps)(policy)
        watch.waits.clear()
        run(made, [first])
        assert made.evictions == 2 and not watch.waits
        run(made, [second])
    # One of the two requests has a store in two groups, of two layers and of one.
    reads = [wait for wait in watch.waits if "inside another" not in wait]
    assert made.evictions == 4 and reads == ["__int__ of a CUDA tensor"] * 2


def launched(policy, **sizes):
    """The operations of one eviction of a long prompt, counted."""
    made, eviction = meta_worker(policy, **sizes)
    with Operations() as used:
        made._evict(eviction)
    assert made.evictions == 1
    return used, eviction


def test_every_policy_that_runs_on_a_gpu_is_counted():
    on_gpu = {name for name, needs in _needs().items() if not needs.attention}
    assert on_gpu == {*FUSED, *OTHERS}


@pytest.mark.parametrize("policy", [*FUSED, *OTHERS])
def test_an_eviction_takes_few_launches(policy):
    used, _ = launched(policy, num_tokens=8192)
    assert 250 < used.launches < 2000
    assert used.names["aten::index_copy_"] >= 32, "tokens moved in every layer"


def test_subgen_chooses_the_centers_of_many_layers_in_one_launch():
    """It makes no float32 copy of the keys, so the memory of other policies holds more of them."""
    used, eviction = launched("subgen", num_tokens=8192)
    assert used.names["vllm_kvevict_ops::greedy_centers"] == 3
    assert 16 * len(eviction.groups[0].store) >= 900, "tokens that a head keeps"
    counts = []
    for tokens in (1024, 4096):
        counts.append(launched("subgen", num_tokens=tokens, layers=4)[0].launches)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_the_warm_up_of_subgen_compiles_the_kernel_of_evictions(fp8, monkeypatch):
    real, seen = subgen.choose_centers, []

    def choose(keys, valid, count):
        seen.append((keys.device.type, keys.dtype, keys.shape[2], keys.stride()[1:]))
        return real(keys, valid, count)

    monkeypatch.setattr(subgen, "choose_centers", choose)
    with pretended(monkeypatch):
        made = worker("subgen", fused=False, device="cuda", fp8=fp8)
        made.warm_up()
        assert len(seen) == 1
        run(made, steps("subgen"))
    assert len(seen) > 4 and set(seen) == {("cuda", torch.float32, SIZE, (SIZE, 1))}


@pytest.mark.parametrize("policy", ["ada-snapkv", "ada-defensive", "ada-probe", "subgen"])
def test_launches_do_not_grow_with_heads(policy):
    counts = []
    for heads in (2, 8):
        made, eviction = meta_worker(policy, num_tokens=1024, layers=8, heads=heads)
        with Operations() as used:
            made._evict(eviction)
        counts.append(used.launches)
    assert counts[1] <= 1.2 * counts[0]


def test_policies_that_mix_heads_get_whole_layers():
    needs = _needs()
    mixing = {name for name in [*FUSED, *OTHERS] if not needs[name].heads_alone}
    assert mixing == {"tova", "ada-tova", "nacl"}
    assert all(needs[name].layers_alone for name in mixing)


@pytest.mark.parametrize("layers", [True, False], ids=["layers alone", "neither"])
def test_a_scorer_gets_no_more_than_it_asks_for(layers, monkeypatch):
    real, seen = TOVA.scores, []

    def scores(self, candidates):
        seen.append((candidates.num_layers, candidates.num_heads, candidates.layers))
        return real(self, candidates)

    monkeypatch.setattr(TOVA, "requirements", Requirements(layers_alone=layers))
    monkeypatch.setattr(TOVA, "scores", scores)
    with pretended(monkeypatch):
        run(worker("tova", fused=False, device="cuda"), steps("tova"))
    of = {name: crc32(name.encode()) for name in ("layer.0", "layer.1", "layer.2")}
    both, third = (of["layer.0"], of["layer.2"]), (of["layer.1"],)
    once = [(2, 6, both), (1, 3, third)]
    if not layers:
        once = [(1, 3, both[:1]), (1, 3, both[1:]), (1, 3, third)]
    assert seen == once * 4


def _needs():
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.names import POLICY_NAMES

    return {
        name: build_policies(EvictionConfig(policy=name))[name].requirements
        for name in POLICY_NAMES
    }


@pytest.mark.parametrize("kinds", [["a"] * 5, ["a", "a", "b", "b", "a"], list("abcde")])
@pytest.mark.parametrize("at_once", [1, 2, 3, 6, 100])
def test_blocks_hold_every_head_once(kinds, at_once):
    heads = 3
    blocks = list(pieces.head_blocks(kinds, heads, at_once))
    assert [head for block in blocks for head in range(block.start, block.stop)] == list(range(15))
    for block in blocks:
        parts = list(pieces.by_layer(block, heads))
        assert block.stop - block.start <= at_once
        assert len({kinds[layer] for layer, _ in parts}) == 1
        assert at_once >= heads or len(parts) == 1
        named = [
            layer * heads + head for layer, own in parts for head in range(own.start, own.stop)
        ]
        assert named == list(range(block.start, block.stop))


@pytest.mark.parametrize("policy", [*FUSED, *OTHERS])
def test_small_layers_are_taken_together_on_a_cpu(policy, monkeypatch):
    options = dict(fused=False, networks="probe" in policy)
    plain, plans = worker(policy, **options), steps(policy, in_place=True)
    run(plain, plans)
    monkeypatch.setattr(pieces, "FLOATS", 2**24)
    real, seen = CandidateReader.candidates, []

    def candidates(*args):
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(CandidateReader, "candidates", candidates)
    made = worker(policy, **options)
    run(made, plans)
    assert made.evictions == plain.evictions == 4
    assert_same(made, plain)
    assert {found.num_layers for found in seen} == {1, 2}, "groups of one layer and of two"


@pytest.mark.parametrize("by_dimension", [True, False])
def test_joined_keys_lie_as_their_parts(by_dimension):
    whole = torch.randn(5, 7, 6).mT if by_dimension else torch.randn(5, 6, 7)
    found = pieces.joined([whole[:2], whole[2:]])
    assert torch.equal(found, whole) and found.stride() == whole.stride()


def test_a_cpu_takes_as_many_layers_as_its_caches_hold(monkeypatch):
    monkeypatch.undo()
    cpu, gpu = torch.device("cpu"), torch.device("meta")
    assert pieces.heads_at_once(cpu, 8, pieces.FLOATS // 8) == 8
    assert pieces.heads_at_once(cpu, 8, pieces.FLOATS // 30) == 24
    assert (
        pieces.heads_at_once(cpu, 8, 10**9) == 8 and pieces.layers_at_once(cpu, 32, 8, 10**6) == 32
    )
    assert pieces.heads_at_once(gpu, 8, 2**20) == 16 and pieces.heads_at_once(gpu, 8, 2**22) == 4
    assert pieces.heads_at_once(gpu, 8, 2**30) == 1
    assert (
        pieces.layers_at_once(gpu, 32, 8, 2**17) == 2
        and pieces.layers_at_once(gpu, 32, 8, 2**30) == 1
    )
