"""The goals of a GPU run, and what was measured of each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Parts = dict[str, Any]
KERNELS = ("triton", "flash per head")
TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Goal:
    """``found`` lists what was measured of it; the worst must not be beyond ``bound``."""

    name: str
    bound: float
    found: Callable[[Parts], list[float]]
    at_most: bool = False

    def verdict(self, parts: Parts) -> str:
        """``reached``, ``missed`` or ``not measured``, and the number."""
        values = self.found(parts)
        sign = "<=" if self.at_most else ">="
        wanted = f"{self.name} | {sign} {self.bound:g}"
        if not values:
            return f"| {wanted} | - | not measured |"
        worst = max(values) if self.at_most else min(values)
        reached = worst <= self.bound if self.at_most else worst >= self.bound
        return f"| {wanted} | {worst:.4g} | {'reached' if reached else 'missed'} |"


def rows(parts: Parts, part: str, **values: Any) -> Iterator[dict[str, Any]]:
    for row in parts.get(part, {}).get("rows", []):
        if all(row.get(name) == value for name, value in values.items()):
            yield row


def decode(requests: int) -> Callable[[Parts], list[float]]:
    """Share of the copy bandwidth of the faster kernel, at each budget."""

    def found(parts: Parts) -> list[float]:
        return [
            row["floor_ms"] / min(row[name]["median_ms"] for name in KERNELS if name in row)
            for row in rows(parts, "attention", requests=requests)
        ]

    return found


def eviction(ranks: int, prompt: int = 32768) -> Callable[[Parts], list[float]]:
    """The worker's pass over the prefill, of which each of several ranks has a share."""

    def found(parts: Parts) -> list[float]:
        prefill = [row["ttft_ms_median"] for row in rows(parts, "serving", input=prompt)
                   if row["case"] == "prefill"]  # fmt: skip
        passes = [row["the worker's pass"]["median_ms"]
                  for row in rows(parts, "eviction", prompt=prompt, ranks=ranks)
                  if "the worker's pass" in row]  # fmt: skip
        return [mine / (whole / ranks) for mine in passes for whole in prefill]

    return found


def output(case: str, setting: str, prompt: int | None = None) -> Callable[[Parts], list[float]]:
    """Output tokens per second over those of vLLM alone, under the same load and memory."""

    def found(parts: Parts) -> list[float]:
        load = {} if prompt is None else {"input": prompt}
        stock = {
            (row["input"], row["output"]): row["output_tokens_per_s"]
            for row in rows(parts, "serving", case=case, setting="stock", **load)
        }
        return [
            row["output_tokens_per_s"] / stock[row["input"], row["output"]]
            for row in rows(parts, "serving", case=case, setting=setting, **load)
            if (row["input"], row["output"]) in stock
        ]

    return found


GOALS = (
    Goal("decode at 64 requests, share of copy bandwidth", 0.8, decode(64)),
    Goal("decode at 256 requests, share of copy bandwidth", 0.8, decode(256)),
    Goal("eviction at 32k over its prefill", 0.005, eviction(1), at_most=True),
    Goal("the same on one of 8 ranks", 0.005, eviction(TENSOR_PARALLEL), at_most=True),
    Goal("output at 8x over stock, 6000/500", 3.5, output("memory-bound", "8x", 6000)),
    Goal("output at 8x over stock, 32000/4000", 2.5, output("memory-bound", "8x", 32000)),
    Goal(
        "output over stock, nothing to evict", 0.97, output("not memory-bound", "nothing to evict")
    ),
)


def verdicts(parts: Parts) -> list[str]:
    """A Markdown table, a line for each goal."""
    head = ["| goal | wanted | worst measured | verdict |", "| --- | --- | --- | --- |"]
    return head + [goal.verdict(parts) for goal in GOALS]
