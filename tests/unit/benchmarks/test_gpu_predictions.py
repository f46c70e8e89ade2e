"""Verdicts on what was predicted for a GPU, of rows made by hand and of those of an H100."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.predictions import NEXT, PREDICTIONS, prediction_table

H100 = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu_h100.json"
CARD = "NVIDIA H100 80GB HBM3, 132 SMs, 79 GiB"
PYTORCH = "F1: PyTorch eviction, 32k, ms"
SPREAD = "F2: flash per head, sigma 1.0, 64 requests"
EVEN = "F2: flash per head, sigma 0.5, 64 requests"
SORTED = "F2: flash, longest first, sigma 0.5, 64 requests"


def lines(parts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Predicted, measured, ratio and verdict of every prediction, by its name."""
    cells = [line.strip("| ").split(" | ") for line in prediction_table(parts)[2:]]
    return {name: rest for name, *rest in cells}


def took(median: float) -> dict[str, float]:
    return dict(median_ms=median, low_ms=median, high_ms=median)


def part(name: str, *rows: dict[str, Any], device: str = CARD, **settings: str) -> dict[str, Any]:
    return dict(part=name, device=device, settings=settings, rows=list(rows))


def passed(*medians: float) -> list[dict[str, Any]]:
    row = dict(policy="ada-snapkv", prompt=32768, ranks=1)
    return [part("eviction", row | {"PyTorch pass": took(median)}) for median in medians]


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ((95.0,), ["95", "1.00", "as predicted"]),
        ((72.0, 121.0), ["72 to 121", "1.02", "as predicted"]),
        ((38.0,), ["38", "0.40", "lower"]),
        ((130.0, 250.0), ["130 to 250", "2.00", "higher"]),
        ((60.0, 100.0), ["60 to 100", "0.84", "partly"]),
    ],
)
def test_a_range(medians, expected):
    """80 to 110 ms were predicted; a tenth below and above counts."""
    assert lines(passed(*medians))[PYTORCH] == ["80 to 110", *expected]


def test_at_least():
    of = "the Triton kernel, 256 requests (P 65%)"
    for median, expected in (
        (1.25, ["0.8", "1.14", "as predicted"]),
        (2.0, ["0.5", "0.71", "lower"]),
    ):
        row = dict(requests=256, budget=1024, copy_gb_per_s=1.0, floor_ms=1.0, triton=took(median))
        assert lines([part("attention", row)])[of] == [">= 0.7", *expected]


def test_rows_of_another_spread_count_for_their_own_prediction():
    row = {"requests": 64, "budget": 1024, "copy_gb_per_s": 1.0, "floor_ms": 1.0}
    row["flash per head"] = took(2.0)
    missing = "not measured: no flash per head with 64 requests, sigma 1.0"
    found = lines([part("attention", row, sigma="0.5")])
    assert found[SPREAD] == ["0.58", "-", "-", missing]
    assert found[EVEN] == ["0.74", "0.5", "0.68", "lower"]
    assert lines([part("attention", row)])[SPREAD] == ["0.58", "0.5", "0.86", "lower"]


def test_errors_and_cpus_prove_nothing():
    (content,) = passed(95.0)
    missing = ["80 to 110", "-", "-", "not measured: no PyTorch pass under ada-snapkv"]
    assert lines([content | {"device": "CPU: a trial"}])[PYTORCH] == missing
    content["rows"][0]["error"] = "out of memory"
    assert lines([content])[PYTORCH] == missing
    assert all(line[-1].startswith("not measured: ") for line in lines([]).values())
    assert len(lines([])) == len(PREDICTIONS) + len(NEXT)


def test_predictions_for_the_next_run():
    tuned = dict(requests=16, budget=1024, programs=2, stages=3, tile=64)
    share = {"share of copy bandwidth": 0.7}
    passes = {"the worker's pass": took(9.0), "the pass without networks": took(6.5)}
    load = dict(case="memory-bound", input=6000, output=500)
    shorter = dict(setting="8x, steps of 2048", itl_ms_p99=63.0)
    found = lines([
        part("tune", tuned | dict(before=96, layer=took(0.035)) | share,
             tuned | dict(before=0, layer=took(0.9)), tuned | dict(splits=1, layer=took(0.04))),
        part("serving", load | dict(setting="8x", running_while_others_wait=16.0),
             load | shorter),
        part("eviction", dict(policy="ada-probe", prompt=32768, ranks=1) | passes),
    ])  # fmt: skip
    assert found["slices, 16 requests of 1,024, us of a layer"] == [
        "34",
        "35",
        "1.03",
        "as predicted",
    ]
    assert found["the same, share of copy bandwidth"][1:] == ["0.7", "0.99", "as predicted"]
    at_once = "requests at once at 8x, 6000/500, while others wait"
    assert found[at_once] == ["21 to 24", "16", "0.71", "lower"]
    assert found["ITL p99 with steps of 2,048, ms"] == ["45", "63", "1.40", "higher"]
    assert found["networks of an eviction, 32k, ms"] == [
        "2.2 to 4.4",
        "2.5",
        "0.76",
        "as predicted",
    ]


def test_the_h100():
    """As benchmarks/results/gpu_h100.md says, calculated from its rows."""
    found = lines([one for one in json.loads(H100.read_text()).values() if "rows" in one])
    assert found["a server that evicts starts (1: yes)"] == ["1", "1", "1.00", "as predicted"]
    assert found["copy bandwidth, TB/s"] == ["2.8", "3.03 to 3.04", "1.08", "as predicted"]
    assert found[PYTORCH][1:] == ["93.2", "0.98", "as predicted"]
    assert found[SPREAD] == ["0.58", "0.684 to 0.792", "1.27", "higher"]
    assert found[EVEN][1:] == ["0.738 to 0.85", "1.07", "partly"]
    assert found[SORTED][1::2] == ["0.732 to 0.923", "partly"]
    assert found["the Triton kernel, 64 requests, sigma 1.0"][1::2] == ["0.689 to 0.883", "partly"]
    assert found["the Triton kernel, 256 requests (P 65%)"][-1] == "as predicted"
    assert found["eviction, 32k, ada-defensive, ms"] == ["6 to 7", "5.5", "0.85", "as predicted"]
    assert found["the same over the prefill"] == ["0.0045", "0.00458", "1.02", "as predicted"]
    assert found["output at 8x over stock, 6000/500"] == ["3.4 to 4", "2.8", "0.76", "lower"]
    # Measured before them.
    assert all(found[one.name][-1].startswith("not measured: ") for one in NEXT)
    nothing = found["F7: nothing evicted, over stock (P 60%)"]
    assert nothing[-1].startswith("not measured: 1 of 3 loads of stock")
