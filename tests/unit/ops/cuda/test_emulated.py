"""Every kernel, emulated, against the PyTorch reference. tests/gpu runs the same on a GPU."""

import pytest
import torch

from tests.kernels import choose, defensive, keep, packed, pages, probe, score
from tests.nightly import covering
from vllm_kvevict.ops.cuda import pages as operations_on_pages

PACKED_SHAPES = [
    pytest.param(shape, id=str(index)) for index, shape in enumerate(packed.COMPACT_CASES)
]

pytestmark = [pytest.mark.usefixtures("emulated"), pytest.mark.slow]


@pytest.mark.parametrize("shape", pages.COMPACT_CASES, ids=lambda s: f"{s.dtype}-{s.head_size}")
def test_compact(shape):
    pages.check_compact("cpu", shape)


@pytest.mark.parametrize("staging", [1, 10_000, 2**26])
@pytest.mark.parametrize("shape", pages.COMPACT_CASES, ids=lambda s: f"{s.dtype}-{s.head_size}")
def test_compact_in_place(shape, staging, monkeypatch):
    """Layer by layer, request by request, and all at once."""
    monkeypatch.setattr(operations_on_pages, "STAGING_BYTES", staging)
    pages.check_compact("cpu", shape, in_place=True)


@pytest.mark.parametrize("case", choose.CASES, ids=lambda case: "-".join(map(str, case)))
def test_allocate_and_select(case):
    for seed in range(3):
        choose.check_padded("cpu", *case, seed=seed)


@pytest.mark.parametrize(
    ("floor", "shape"),
    covering(
        [0.0, 0.2, 1.0],
        [
            pytest.param(choose.BATCH, id="as cached"),
            pytest.param(choose.STORED, id="in few bits"),
        ],
    ),
)
def test_allocate_and_select_a_batch(shape, floor):
    choose.check_batch("cpu", shape, floor)


@pytest.mark.parametrize("kind", ["few", "steep"])
@pytest.mark.parametrize(
    "shape",
    [choose.BATCH, choose.LONG, choose.STORED],
    ids=["short", "long", "in few bits"],
)
def test_allocate_by_fixed_shares(shape, kind):
    for seed in range(3):
        choose.check_shares("cpu", shape, kind, seed)


def test_select_among_131072_tokens():
    """As many as a request has; a page of 16 is kept, so that the emulation writes little."""
    choose.check_padded("cpu", 1, 131072 // 16, 16, 1, 0.2, "attention")


@pytest.mark.parametrize("case", score.CASES, ids=range(len(score.CASES)))
def test_window_scores(case):
    score.check_scores("cpu", case)


def test_a_key_that_is_not_a_number():
    score.check_not_a_number("cpu", score.CASES[0])


@pytest.mark.parametrize("case", [score.CASES[0], score.CASES[7]], ids=["half", "float"])
def test_column_sums_of_a_given_lse(case):
    score.check_column_sums("cpu", case)


def test_an_eviction_from_queries_to_store():
    score.check_eviction("cpu", score.EVICTION)


@pytest.mark.parametrize("case", score.CASES, ids=range(len(score.CASES)))
def test_defensive_scores(case):
    defensive.check_scores("cpu", case)


def test_defensive_and_a_key_that_is_not_a_number():
    defensive.check_not_a_number("cpu", score.CASES[0])


@pytest.mark.parametrize("made, channels", [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_numbers_of_survivors(made, channels):
    keep.check_keep("cpu", score.EVICTION, made, channels)


@pytest.mark.parametrize("case", probe.CASES, ids=range(len(probe.CASES)))
def test_probe_scores(case):
    probe.check_scores("cpu", *case)


def test_probe_beside_another_rank():
    probe.check_ranks("cpu", *probe.CASES[0])


@pytest.mark.parametrize(
    "case, units", zip(probe.CASES, probe.UNITS, strict=True), ids=range(len(probe.CASES))
)
def test_probe_networks(case, units):
    probe.check_scores("cpu", *case, units)


@pytest.mark.parametrize("case", [probe.CASES[0], probe.CASES[7]], ids=["bfloat16", "fp8"])
def test_networks_of_two_ranks(case):
    probe.check_networks_of_ranks("cpu", *case)


@pytest.mark.parametrize("units", [0, 32])
def test_probe_of_tokens_without_values(units):
    probe.check_without_values("cpu", *probe.CASES[0], units)


def test_probe_of_a_key_without_bounds():
    probe.check_infinite("cpu", *probe.CASES[0])


@pytest.mark.parametrize("units", [0, 32])
def test_probe_and_a_key_that_is_not_a_number(units):
    probe.check_not_a_number("cpu", *probe.CASES[0], units)


@pytest.mark.parametrize(("shape", "in_place"), covering(PACKED_SHAPES, [False, True]))
def test_compact_to_few_bits(shape, in_place):
    packed.check_compact("cpu", shape, in_place)


def test_elements_that_are_no_numbers_in_few_bits():
    packed.check_odd_elements("cpu")


@pytest.mark.parametrize(
    ("case", "check"),
    covering(
        [pytest.param(case, id=str(index)) for index, case in enumerate(packed.CASES)],
        [
            pytest.param(score.check_scores, id="window"),
            pytest.param(defensive.check_scores, id="defensive"),
        ],
    ),
)
def test_scores_of_stores_in_few_bits(case, check):
    check("cpu", case)


def test_probe_scores_beside_stores_in_few_bits():
    case = packed.CASES[2]
    probe.check_scores("cpu", case, probe.Rotated(48, torch.float32), 32)
    probe.check_ranks("cpu", case, probe.Rotated(48, torch.float32))


@pytest.mark.parametrize("made, channels", [(1, 1), (2, 3)])
def test_numbers_of_survivors_in_few_bits(made, channels):
    keep.check_keep("cpu", packed.KEPT, made, channels)
