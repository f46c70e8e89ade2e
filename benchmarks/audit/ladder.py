"""What a target would choose of the budgets measured, beside one budget for all prompts."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.audit.figures import HIGH, Row
from benchmarks.quality.table import row

TARGETS = (0.02, 0.025, 0.03, 0.04, 0.05)
HEAD = ("policy", "prompts", "target", "kept", "one budget of that loss", "answer, mean",
        f"above {HIGH}, %")  # fmt: skip

Prompts = list[dict[str, Row]]
"""Rows of one prompt by budget."""


def of_rows(rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], dict[str, Row]]]:
    """Rows by policy, prompt and budget; without prompts of which a budget was not measured."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for one in rows:
        found[one["policy"]][one["kind"], one["seed"]][one["budget"]] = one
    budgets = {one["budget"] for one in rows}
    return {
        policy: {
            prompt: by_budget
            for prompt, by_budget in prompts.items()
            if by_budget.keys() == budgets and None not in [r["audit"] for r in by_budget.values()]
        }
        for policy, prompts in found.items()
    }


def share(budget: str) -> float:
    return float(budget[:-1]) / 100


def budget_with(prompts: Prompts, loss: float) -> float:
    """The part that one budget for all would keep at this mean loss, by lines between budgets.

    The whole cache loses nothing; of a loss above that of the smallest budget it is this one.
    """
    budgets = sorted(prompts[0], key=share)
    points = [(share(b), fmean(p[b]["answer"] for p in prompts)) for b in budgets] + [(1.0, 0.0)]
    before = points[0]
    for point in points:
        if point[1] <= loss:
            part = (before[1] - loss) / (before[1] - point[1]) if before[1] > point[1] else 1.0
            return before[0] + (point[0] - before[0]) * max(0.0, part)
        before = point
    return 1.0


def chosen(prompt: dict[str, Row], target: float) -> tuple[float, float]:
    """Part that is kept, and nats that the answer loses, where a target chooses.

    Rows of older runs have no expected loss: their targets were of audits.
    """
    for budget in sorted(prompt, key=share):
        if prompt[budget].get("expected", prompt[budget]["audit"]) <= target:
            return share(budget), prompt[budget]["answer"]
    return 1.0, 0.0


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: each target over all prompts, and over those that ask for no other facts."""
    lines = [row(*HEAD), row("---", "---", *["---:"] * 5)]
    for policy, prompts in of_rows(rows).items():
        for name in ("all", "without other facts"):
            mine = [p for (kind, _), p in prompts.items() if name == "all" or "facts" not in kind]
            if not mine:
                continue
            for target in TARGETS:
                found = [chosen(prompt, target) for prompt in mine]
                kept, loss = fmean(part for part, _ in found), fmean(nats for _, nats in found)
                much = 100 * fmean(nats > HIGH for _, nats in found)
                alike = f"{budget_with(mine, loss):.1%}"
                line = [policy, name, str(target), f"{kept:.1%}", alike, f"{loss:.4f}"]
                lines.append(row(*line, f"{much:.1f}"))
    return lines
