"""The goals of a GPU run, and what was measured of each."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.attention import BUDGETS
from benchmarks.gpu.eviction import PASS

Parts = dict[str, Any]
Row = dict[str, Any]
TENSOR_PARALLEL = 8
POLICY = "ada-snapkv"
LOADS = 3
"""Loads on each side where nothing evicts: one is noise."""


@dataclass
class Evidence:
    """Numbers, and what keeps them from being a whole measurement."""

    values: list[float] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Goal:
    """The worst of what was found must not be beyond ``bound``."""

    name: str
    bound: float
    found: Callable[[Parts], Evidence]
    at_most: bool = False

    def verdict(self, parts: Parts) -> str:
        """``reached``, ``missed`` or ``not measured`` and why, and the number.

        A number beyond the bound misses the goal, whatever else was not measured.
        """
        evidence = self.found(parts)
        values, lacking = evidence.values, "; ".join(dict.fromkeys(evidence.lacking))
        sign = "<=" if self.at_most else ">="
        wanted = f"{self.name} | {sign} {self.bound:g}"
        if not values:
            return f"| {wanted} | - | not measured: {lacking} |"
        worst = max(values) if self.at_most else min(values)
        within = worst <= self.bound if self.at_most else worst >= self.bound
        said = "missed" if not within else f"not measured: {lacking}" if lacking else "reached"
        return f"| {wanted} | {worst:.4g} | {said} |"


def rows(parts: Parts, part: str, **values: Any) -> Iterator[Row]:
    """Rows of a part that ran on a GPU, errors aside."""
    content = parts.get(part, {})
    for row in content.get("rows", []):
        known = all(row.get(name) == value for name, value in values.items())
        if known and "error" not in row and not content["device"].startswith("CPU"):
            yield row


def decode(requests: int) -> Callable[[Parts], Evidence]:
    """Share of the copy bandwidth of the kernel that a server runs, at every budget."""

    def found(parts: Parts) -> Evidence:
        evidence = Evidence()
        for budget in BUDGETS:
            row = next(rows(parts, "attention", requests=requests, budget=budget), None)
            if row is None:
                evidence.lacking.append(f"no budget of {budget}")
            else:
                took = row[row["served by"]]["median_ms"]
                evidence.values.append(row["floor_ms"] / took)
        return evidence

    return found


def eviction(ranks: int, prompt: int = 32768) -> Callable[[Parts], Evidence]:
    """The worker's pass over the prefill, of which each of several ranks has a share."""

    def found(parts: Parts) -> Evidence:
        prefill = next(rows(parts, "serving", case="prefill", input=prompt), None)
        mine = next(rows(parts, "eviction", policy=POLICY, prompt=prompt, ranks=ranks), None)
        if mine is None or PASS not in mine:
            return Evidence(lacking=["no pass of the worker"])
        if prefill is None:
            return Evidence(lacking=["no prefill"])
        source = [
            (parts[name]["device"], parts[name]["provenance"]["commit"])
            for name in ("eviction", "serving")
        ]
        if source[0] != source[1]:
            return Evidence(lacking=["pass and prefill are of other GPUs or commits"])
        share = mine[PASS]["median_ms"] / (prefill["prefill"]["median_ms"] / ranks)
        return Evidence([share])

    return found


def flaws(row: Row, evicts: bool) -> list[str]:
    """Why a load proves nothing."""
    name, found = row["setting"], []
    if row["completed"] != row["prompts"] or row["failed"]:
        found.append(f"{name} answered {row['completed']} of {row['prompts']}")
    if bool(row["evictions"]) != evicts:
        found.append(f"{name} evicted {row['evictions']} times")
    if name != "stock" and not row["cuda_kernels"]:
        found.append(f"{name} had no CUDA kernels")
    return found


def output(prompt: int, tokens: int, setting: str = "8x") -> Callable[[Parts], Evidence]:
    """Output tokens per second over those of vLLM alone, under the same load and memory."""

    def found(parts: Parts) -> Evidence:
        load = dict(case="memory-bound", input=prompt, output=tokens)
        pair = [next(rows(parts, "serving", setting=s, **load), None) for s in ("stock", setting)]
        stock, ours = pair
        if stock is None or ours is None:
            missing = [s for s, row in zip(("stock", setting), pair, strict=True) if row is None]
            return Evidence(lacking=[f"no {s}" for s in missing])
        if problems := flaws(stock, False) + flaws(ours, True):
            return Evidence(lacking=problems)
        # Of the steady part, where both loads were long enough to have one.
        name = "steady_output_tokens_per_s"
        if name not in stock or name not in ours:
            name = "output_tokens_per_s"
        return Evidence([ours[name] / stock[name]])

    return found


def nothing_evicts(parts: Parts) -> Evidence:
    """The median of some loads over that of as many on vLLM alone."""
    medians, lacking = {}, []
    for setting in ("stock", "nothing to evict"):
        mine = list(rows(parts, "serving", case="not memory-bound", setting=setting))
        problems = [flaw for row in mine for flaw in flaws(row, False)]
        if len(mine) < LOADS:
            problems.append(f"{len(mine)} of {LOADS} loads of {setting}")
        lacking += problems
        if not problems:
            medians[setting] = statistics.median(row["output_tokens_per_s"] for row in mine)
    if lacking:
        return Evidence(lacking=lacking)
    return Evidence([medians["nothing to evict"] / medians["stock"]])


GOALS = (
    Goal("decode at 64 requests, share of copy bandwidth", 0.8, decode(64)),
    Goal("decode at 256 requests, share of copy bandwidth", 0.8, decode(256)),
    Goal("eviction at 32k over its prefill", 0.005, eviction(1), at_most=True),
    Goal("the same on one of 8 ranks", 0.005, eviction(TENSOR_PARALLEL), at_most=True),
    Goal("output at 8x over stock, 6000/500", 3.5, output(6000, 500)),
    Goal("output at 8x over stock, 32000/4000", 2.5, output(32000, 4000)),
    Goal("output over stock, nothing to evict", 0.97, nothing_evicts),
)


def verdicts(parts: Parts) -> list[str]:
    """A Markdown table, a line for each goal."""
    head = ["| goal | wanted | worst measured | verdict |", "| --- | --- | --- | --- |"]
    return head + [goal.verdict(parts) for goal in GOALS]
