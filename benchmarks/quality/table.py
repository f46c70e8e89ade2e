"""The results as Markdown."""

from benchmarks.quality.cell import FULL, FULL_CELL, Cell
from benchmarks.quality.flips import Flips
from benchmarks.quality.intervals import Estimate
from benchmarks.quality.prompt import SCENARIOS
from benchmarks.quality.results import AVERAGE, Results


def percent(found: Estimate) -> str:
    """``mean [low, high]`` in percent."""
    return f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def paired(found: Flips) -> str:
    """``-worse +better, p``; the p in bold below 0.05."""
    p = f"p {found.p:.2g}"
    return f"-{found.worse} +{found.better}, {f'**{p}**' if found.p < 0.05 else p}"


def points(found: Estimate) -> str:
    """A difference in percentage points; in bold where its interval does not hold 0."""
    text = f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return text if found.low <= 0 <= found.high else f"**{text}**"


def beside_full(excess: dict[str, float], same: dict[str, float]) -> tuple[str, str]:
    """Two fields: NLL over the full cache's in nats, and equal first choices in percent."""
    return (
        f"{excess['mean']:+.3f} [{excess['low']:+.3f}, {excess['high']:+.3f}]",
        f"{100 * same['mean']:.1f} [{100 * same['low']:.1f}, {100 * same['high']:.1f}]",
    )


def row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |"


def markdown(results: Results, kept: dict[tuple[str, str], dict]) -> str:
    """Every table of a run.

    Args:
        results: What was measured.
        kept: By (scenario, budget): ``tokens`` and ``point``, means over the requests, and
            ``covered``, requests whose budget covered everything.

    """
    parts = [_full(results)]
    budgets = results.budgets()
    for scenario in SCENARIOS:
        labels = results.labels(scenario)
        if not labels:
            continue
        parts += [f"## {scenario.capitalize()}", "", row("task", "policy", *budgets)]
        parts.append(row("---", "---", *["---:"] * len(budgets)))
        for task in (AVERAGE, *results.tasks):
            parts.append(row(task, FULL, *[percent(results.full[task])] * len(budgets)))
            for label in labels:
                cells = [Cell(scenario, label, budget) for budget in budgets]
                parts.append(row("", label, *(_entry(results, cell, task) for cell in cells)))
        parts += ["", *_kept(scenario, budgets, kept), "", *_differences(results, scenario), ""]
    return "\n".join(parts)


def _entry(results: Results, cell: Cell, task: str) -> str:
    accuracy, flips = percent(results.estimates[cell][task]), results.flips.get((cell, task))
    return accuracy if flips is None else f"{accuracy}; {paired(flips)}"


def _full(results: Results) -> str:
    others = [cell for cell in results.estimates if not cell.scenario and cell != FULL_CELL]
    lines = ["## Full cache", "", row("task", FULL, *(cell.label for cell in others))]
    lines.append(row("---", "---:", *["---:"] * len(others)))
    for task in (*results.tasks, AVERAGE):
        found = [results.full[task], *(results.estimates[cell][task] for cell in others)]
        lines.append(row(task, *map(percent, found)))
    if results.left_out:
        names = ", ".join(f"{task} {percent(found)}" for task, found in results.left_out.items())
        lines += ["", f"Left out, because the model does not do them with its full cache: {names}."]
    return "\n".join([*lines, ""])


def _kept(scenario: str, budgets: list[str], kept: dict[tuple[str, str], dict]) -> list[str]:
    found = [kept[scenario, budget] for budget in budgets]
    lines = [row(f"kept tokens per head, {scenario}", *budgets)]
    lines.append(row("---", *["---:"] * len(budgets)))
    lines.append(row("mean", *(f"{one['tokens']:.0f} of {one['point']:.0f}" for one in found)))
    lines.append(row("budget covers everything", *(f"{one['covered']:.0%}" for one in found)))
    return lines


def _differences(results: Results, scenario: str) -> list[str]:
    budgets = results.budgets()
    pairs = {
        (first.label, second.label): None
        for first, second in results.differences
        if first.scenario == scenario
    }
    if not pairs:
        return []
    lines = [row("difference of the averages, in points", *budgets)]
    lines.append(row("---", *["---:"] * len(budgets)))
    for first, second in pairs:
        found = [
            results.differences[Cell(scenario, first, budget), Cell(scenario, second, budget)]
            for budget in budgets
        ]
        lines.append(row(f"{first} - {second}", *map(points, found)))
    return lines
