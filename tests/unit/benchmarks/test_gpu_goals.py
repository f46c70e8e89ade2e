"""The GPU benchmark's verdicts: what each needs, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.gpu.goals import GOALS, verdicts

SOURCE = dict(commit="c", command="python", date="d", versions={}, machine="m")
DECODE_64, DECODE_256, EVICTION, RANK, SHORT, LONG, NOTHING = range(7)


def milliseconds(median: float) -> dict[str, float]:
    return dict(median_ms=median, low_ms=median, high_ms=median)


def attention(requests: int, budget: int, **took: float) -> dict[str, Any]:
    kernel = "flash per head" if requests * 8 <= 992 else "triton"
    times = {name.replace("_", " "): milliseconds(value) for name, value in took.items()}
    return {"requests": requests, "budget": budget, "floor_ms": 1.0, "served by": kernel} | times


def serving(case: str, setting: str, shape: tuple[int, int], speed: float, load: int = 0) -> Any:
    row: dict[str, Any] = dict(
        case=case, setting=setting, input=shape[0], output=shape[1], output_tokens_per_s=speed,
        prompts=32, completed=32, failed=0, evictions=90 if setting == "8x" else 0,
        cuda_kernels=setting != "stock",
    )  # fmt: skip
    return row | (dict(load=load) if load else {})


def parts() -> dict[str, Any]:
    decode = [
        attention(requests, budget, triton=1.1, flash_per_head=1.2)
        for requests in (64, 256) for budget in (512, 1024, 4096)
    ]  # fmt: skip
    passes = [
        {"policy": "ada-snapkv", "prompt": 32768, "ranks": ranks, "the worker's pass": took}
        for ranks, took in ((1, milliseconds(4.0)), (8, milliseconds(0.7)))
    ]
    other = {"policy": "ada-defensive", "the worker's pass": milliseconds(90.0)}
    prefill = dict(case="prefill", setting="stock", input=32768, prefill=milliseconds(1000.0))
    short, long = (6000, 500), (32000, 4000)
    loads = [
        serving("memory-bound", "stock", short, 100.0),
        serving("memory-bound", "8x", short, 360.0),
        serving("memory-bound", "stock", long, 100.0),
        serving("memory-bound", "8x", long, 300.0),
    ]
    for number, speed in enumerate((80.0, 98.0, 99.0), 1):
        loads.append(serving("not memory-bound", "stock", short, 100.0, number))
        loads.append(serving("not memory-bound", "nothing to evict", short, speed, number))
    rows = dict(attention=decode, eviction=[passes[1] | other, *passes], serving=[prefill, *loads])
    return {
        name: dict(rows=found, device="a card", provenance=dict(SOURCE))
        for name, found in rows.items()
    }


def outcomes(content: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in line.split("|")[3:5]) for line in verdicts(content)[2:]]


def row(content: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
    (found,) = (
        one for one in content[part]["rows"] if all(one.get(k) == v for k, v in values.items())
    )
    return found


def test_verdicts():
    found = outcomes(parts())
    assert len(found) == len(GOALS)
    # FlashAttention serves 64 requests, our kernel 256.
    assert found[DECODE_64] == ("0.8333", "reached") and found[DECODE_256] == ("0.9091", "reached")
    assert found[EVICTION] == ("0.004", "reached")
    # An eighth of the prefill is 125 ms.
    assert found[RANK] == ("0.0056", "missed")
    assert found[SHORT] == ("3.6", "reached") and found[LONG] == ("3", "reached")
    # The median of three loads.
    assert found[NOTHING] == ("0.98", "reached")
    assert all(line[1].startswith("not measured: ") for line in outcomes({}))


def test_the_kernel_that_a_server_runs_is_judged():
    content = parts()
    slow = row(content, "attention", requests=64, budget=512)
    slow["flash per head"] = milliseconds(1.6)
    assert outcomes(content)[DECODE_64] == ("0.625", "missed")
    slow["served by"] = "triton"
    assert outcomes(content)[DECODE_64] == ("0.8333", "reached")


def test_every_budget_counts():
    content = parts()
    rows = content["attention"]["rows"]
    rows.remove(row(content, "attention", requests=64, budget=4096))
    assert outcomes(content)[DECODE_64] == ("0.8333", "not measured: no budget of 4096")
    # One that misses is enough to miss.
    row(content, "attention", requests=64, budget=512)["flash per head"] = milliseconds(2.0)
    assert outcomes(content)[DECODE_64] == ("0.5", "missed")
    rows[:] = [dict(requests=64, budget=512, error="out of memory")]
    assert outcomes(content)[DECODE_64][1].startswith("not measured: no budget of 512; no budget")


LOADS: list[tuple[int, dict[str, Any], str, Callable[[dict[str, Any]], object]]] = [
    (SHORT, dict(setting="8x", input=6000), "8x answered 28 of 32",
     lambda row: row.update(completed=28)),
    (SHORT, dict(setting="stock", input=6000, case="memory-bound"), "stock answered 32 of 32",
     lambda row: row.update(failed=4)),
    (LONG, dict(setting="8x", input=32000), "8x evicted 0 times",
     lambda row: row.update(evictions=0)),
    (LONG, dict(setting="8x", input=32000), "8x had no CUDA kernels",
     lambda row: row.update(cuda_kernels=False)),
    (LONG, dict(setting="stock", input=32000), "no stock",
     lambda row: row.update(error="killed")),
    (NOTHING, dict(setting="nothing to evict", load=2), "nothing to evict evicted 3 times",
     lambda row: row.update(evictions=3)),
    (NOTHING, dict(setting="stock", load=3), "2 of 3 loads of stock",
     lambda row: row.update(error="killed")),
]  # fmt: skip


@pytest.mark.parametrize(("goal", "which", "reason", "spoil"), LOADS, ids=range(len(LOADS)))
def test_loads_that_prove_nothing(goal, which, reason, spoil):
    content = parts()
    spoil(row(content, "serving", **which))
    assert outcomes(content)[goal] == ("-", f"not measured: {reason}")


def test_a_cpu_and_two_cards_prove_nothing():
    content = parts()
    for part in content.values():
        part["device"] = "CPU: a trial"
    assert all(line[0] == "-" for line in outcomes(content))
    content = parts()
    content["eviction"]["device"] = "another card"
    assert outcomes(content)[EVICTION][1].endswith("are of other GPUs or commits")
