"""Predictions for an H100, made before a run there, compared with measurements.

:data:`PREDICTIONS` come from a reading of the code at commit 862b6e1 and from a simulation of
queues. :data:`NEXT` were made for what has changed since the first run there, at commit 5c07276a.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.attention import FLASH, TRITON
from benchmarks.gpu.eviction import PASS, WITHOUT_NETWORKS
from benchmarks.gpu.goals import Evidence, nothing_evicts, output
from vllm_kvevict.attention.scratch import BEFORE_SEQUENCE
from vllm_kvevict.ops.triton.residency import resident
from vllm_kvevict.ops.triton.slices import TILE

Part = dict[str, Any]
Row = dict[str, Any]
TOLERANCE = 0.1
"""A measured number within a tenth of the predicted range is as predicted."""
EQUAL, SORTED, PYTORCH = "flash, equal lengths", "flash, longest first", "PyTorch pass"
LONG = 32768


@dataclass(frozen=True)
class Prediction:
    """A predicted range, and the numbers in the result files that it speaks of.

    Args:
        name: What was predicted, with the unit.
        low: Lower end of the range.
        high: Upper end of the range, infinite if only a lower one was predicted.
        found: Returns the measured numbers.

    """

    name: str
    low: float
    high: float
    found: Callable[[Sequence[Part]], Evidence]

    def verdict(self, parts: Sequence[Part]) -> str:
        """Return a row of a table: predicted, measured, ratio, verdict.

        The ratio is that of the middle of what was measured to the middle of the predicted range.
        """
        evidence = self.found(parts)
        values = sorted(evidence.values)
        open_ended = self.high == float("inf")
        wanted = f">= {self.low:g}" if open_ended else span(self.low, self.high)
        if not values:
            reasons = "; ".join(dict.fromkeys(evidence.lacking))
            return f"| {self.name} | {wanted} | - | - | not measured: {reasons} |"
        low, high = self.low * (1 - TOLERANCE), self.high * (1 + TOLERANCE)
        middle = self.low if open_ended else (self.low + self.high) / 2
        ratio = (values[0] + values[-1]) / 2 / middle
        if low <= values[0] and values[-1] <= high:
            said = "as predicted"
        elif values[-1] < low:
            said = "lower"
        elif values[0] > high:
            said = "higher"
        else:
            said = "partly"
        return f"| {self.name} | {wanted} | {span(values[0], values[-1])} | {ratio:.2f} | {said} |"


def span(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def rows(parts: Sequence[Part], part: str, **values: Any) -> Iterator[tuple[Part, Row]]:
    """Rows of all files of a part that ran on a GPU, errors aside, with their files."""
    for content in parts:
        if content["part"] != part or content["device"].startswith("CPU"):
            continue
        for row in content["rows"]:
            if "error" not in row and all(row.get(key) == value for key, value in values.items()):
                yield content, row


def share(
    kernel: str, requests: Sequence[int], sigma: float | None
) -> Callable[[Sequence[Part]], Evidence]:
    """Shares of the copy bandwidth of a kernel, at all budgets.

    Args:
        kernel: Name of its column.
        requests: Batches that count.
        sigma: Spread of the heads' shares; None for any, because lengths are equal.

    """

    def found(parts: Sequence[Part]) -> Evidence:
        evidence = Evidence()
        for content, row in rows(parts, "attention"):
            # Files from before the option are of its default.
            spread = float(content.get("settings", {}).get("sigma", 1.0))
            if row["requests"] in requests and kernel in row and sigma in (None, spread):
                evidence.values.append(row["floor_ms"] / row[kernel]["median_ms"])
        spread_of = "" if sigma is None else f", sigma {sigma}"
        batches = " or ".join(map(str, requests))
        if not evidence.values:
            evidence.lacking.append(f"no {kernel} with {batches} requests{spread_of}")
        return evidence

    return found


def eviction(policy: str, column: str) -> Callable[[Sequence[Part]], Evidence]:
    """Milliseconds of evictions after a long prompt."""

    def found(parts: Sequence[Part]) -> Evidence:
        passes = rows(parts, "eviction", policy=policy, prompt=LONG, ranks=1)
        values = [row[column]["median_ms"] for _, row in passes if column in row]
        return Evidence(values, [] if values else [f"no {column} under {policy}"])

    return found


def of_prefill(policy: str) -> Callable[[Sequence[Part]], Evidence]:
    """Evictions after a long prompt over its prefill."""

    def found(parts: Sequence[Part]) -> Evidence:
        evidence = eviction(policy, PASS)(parts)
        prefills = rows(parts, "serving", case="prefill", input=LONG)
        took = [row["prefill"]["median_ms"] for _, row in prefills]
        if not took:
            return Evidence(lacking=[*evidence.lacking, "no prefill"])
        return Evidence([value / took[0] for value in evidence.values], evidence.lacking)

    return found


def bandwidth(parts: Sequence[Part]) -> Evidence:
    """TB/s of a large copy."""
    copies = [row.get("copy_gb_per_s") for _, row in rows(parts, "attention")]
    found = [speed / 1000 for speed in copies if speed]
    return Evidence(found, [] if found else ["no attention"])


def serving(goal: Callable[[Part], Evidence]) -> Callable[[Sequence[Part]], Evidence]:
    """Return a function that applies a goal to the rows of all serving files together."""

    def found(parts: Sequence[Part]) -> Evidence:
        files = [part for part in parts if part["part"] == "serving"]
        if not files:
            return Evidence(lacking=["no serving"])
        every = [row for part in files for row in part["rows"]]
        return goal({"serving": files[0] | {"rows": every}})

    return found


def of_load(setting: str, column: str) -> Callable[[Sequence[Part]], Evidence]:
    """A column of the memory-bound loads of 6,000 tokens."""

    def found(parts: Sequence[Part]) -> Evidence:
        loads = rows(parts, "serving", case="memory-bound", input=6000, setting=setting)
        values = [row[column] for _, row in loads if row.get(column) is not None]
        return Evidence(values, [] if values else [f"no {column} of {setting}"])

    return found


def slices(column: Callable[[Row], float]) -> Callable[[Sequence[Part]], Evidence]:
    """The decode kernel over slices, with its defaults, for 16 requests of 1,024 tokens."""
    h100 = resident(128, 2, False, 228 * 1024)
    defaults = dict(programs=h100.programs, stages=h100.few, before=BEFORE_SEQUENCE, tile=TILE)

    def found(parts: Sequence[Part]) -> Evidence:
        mine = rows(parts, "tune", requests=16, budget=1024, **defaults)
        values = [column(row) for _, row in mine]
        return Evidence(values, [] if values else ["no tune with the defaults"])

    return found


def networks(parts: Sequence[Part]) -> Evidence:
    """Milliseconds by which networks lengthen an eviction after a long prompt."""
    passes = rows(parts, "eviction", policy="ada-probe", prompt=LONG, ranks=1)
    values = [
        row[PASS]["median_ms"] - row[WITHOUT_NETWORKS]["median_ms"]
        for _, row in passes
        if WITHOUT_NETWORKS in row
    ]
    return Evidence(values, [] if values else ["no eviction with networks"])


def starts(parts: Sequence[Part]) -> Evidence:
    """1 if a server that evicts answered."""
    settings = list(rows(parts, "serving", setting="8x"))
    return Evidence([1.0] if settings else [], [] if settings else ["no server evicted"])


def unmeasured(why: str) -> Callable[[Sequence[Part]], Evidence]:
    return lambda parts: Evidence(lacking=[why])


NO_LOAD = "no part has 64 requests of 32k"
IN_LOG = "start-up lines of a server name it"
NO_BLACKWELL = "no part compares them"
BY_HAND = "no part times it; `nsys` shows it"
OPEN = float("inf")
SHARES = {
    (FLASH, 0.5): (0.58, 0.74, 0.83),
    (FLASH, 1.0): (0.60, 0.58, 0.72),
    (EQUAL, None): (0.96, 0.96, 0.90),
    (SORTED, 0.5): (0.72, 0.97, 0.95),
}
"""Simulated shares of the copy bandwidth, by kernel and spread, with 16, 64 and 120 requests."""
BATCHES = {16: (16,), 64: (64,), 120: (120, 124)}
"""Batches that count as those of the simulation."""
SHARE_PREDICTIONS = [
    Prediction(
        f"F2: {kernel}{'' if sigma is None else f', sigma {sigma}'}, {requests} requests",
        simulated,
        simulated,
        share(kernel, batches, sigma),
    )
    for (kernel, sigma), by_requests in SHARES.items()
    for (requests, batches), simulated in zip(BATCHES.items(), by_requests, strict=True)
]
PREDICTIONS = (
    Prediction("a server that evicts starts (1: yes)", 1, 1, starts),
    Prediction("copy bandwidth, TB/s", 2.8, 2.8, bandwidth),
    Prediction("F1: PyTorch eviction, 32k, ms", 80, 110, eviction("ada-snapkv", PYTORCH)),
    *SHARE_PREDICTIONS,
    Prediction("the Triton kernel, 64 requests, sigma 1.0", 0.97, 0.97, share(TRITON, (64,), 1.0)),
    Prediction("the Triton kernel, 256 requests (P 65%)", 0.7, OPEN, share(TRITON, (256,), 1.0)),
    Prediction("F6: page tables, 131k, ms of a step", 1.5, 1.9, unmeasured(BY_HAND)),
    Prediction("F7: nothing evicted, over stock (P 60%)", 0.97, OPEN, serving(nothing_evicts)),
    Prediction("F8: stalls of an eviction, ms (P 60%)", 5, 30, unmeasured(BY_HAND)),
    Prediction("F13: Blackwell, speed over FlashInfer (P 60%)", 0, 1, unmeasured(NO_BLACKWELL)),
    Prediction("eviction, 32k, ada-defensive, ms", 6, 7, eviction("ada-defensive", PASS)),
    Prediction("the same over the prefill", 0.0045, 0.0045, of_prefill("ada-defensive")),
    Prediction("eviction, 32k, ada-snapkv, over the prefill", 0, 0.005, of_prefill("ada-snapkv")),
    Prediction("memory in addition to the cache, MiB", 2348, 2348, unmeasured(IN_LOG)),
    Prediction("eviction while decoding, ms", 1, 1, unmeasured("no part times it")),
    Prediction("step, 64 requests, FlashAttention 3, sigma 0.5, ms", 23.5, 26, unmeasured(NO_LOAD)),
    Prediction("step, 64 requests, FlashAttention 3, sigma 1.0, ms", 27, 31, unmeasured(NO_LOAD)),
    Prediction("step, 64 requests, the Triton kernel, ms", 21, 21, unmeasured(NO_LOAD)),
    Prediction("step, stock, 12 requests of 32k, ms", 27, 27, unmeasured(NO_LOAD)),
    Prediction("output at 8x over stock, 6000/500", 3.4, 4, serving(output(6000, 500))),
)  # fmt: skip
NEXT = (
    Prediction("slices, 16 requests of 1,024, us of a layer", 34, 34,
               slices(lambda row: 1000 * row["layer"]["median_ms"])),
    Prediction("the same, share of copy bandwidth", 0.71, 0.71,
               slices(lambda row: row["share of copy bandwidth"])),
    Prediction("requests at once at 8x, 6000/500, while others wait", 21, 24,
               of_load("8x", "running_while_others_wait")),
    Prediction("ITL p99 with steps of 2,048, ms", 45, 45,
               of_load("8x, steps of 2048", "itl_ms_p99")),
    Prediction("networks of an eviction, 32k, ms", 2.2, 4.4, networks),
)  # fmt: skip


def prediction_table(parts: Sequence[Part]) -> list[str]:
    """Return a Markdown table, a line for each prediction.

    Args:
        parts: Contents of result files, several of one part if settings differ.

    """
    head = [
        "| prediction for an H100 | predicted | measured | ratio | verdict |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    return head + [prediction.verdict(parts) for prediction in (*PREDICTIONS, *NEXT)]
