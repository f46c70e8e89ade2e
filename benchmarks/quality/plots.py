"""Accuracy against budget: one figure a scenario, one panel a task, one line a policy."""

from pathlib import Path

from benchmarks.quality.cell import FULL, Cell
from benchmarks.quality.prompt import SCENARIOS
from benchmarks.quality.results import AVERAGE, Results

COLUMNS = 3


def positions(budgets: list[str]) -> list[float]:
    """Budgets on the horizontal axis: shares in percent, or tokens."""
    if all(budget.endswith("%") for budget in budgets):
        return [float(budget[:-1]) for budget in budgets]
    return [float(index) for index in range(len(budgets))]


def plot(results: Results, output: Path) -> list[Path]:
    """Write ``<output>_<scenario>.png`` for each measured scenario; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets, panels, paths = results.budgets(), (AVERAGE, *results.tasks), []
    for scenario in SCENARIOS:
        labels = results.labels(scenario)
        if not labels:
            continue
        rows = -(-len(panels) // COLUMNS)
        figure, axes = pyplot.subplots(
            rows, COLUMNS, figsize=(4.2 * COLUMNS, 3.0 * rows), sharex=True, squeeze=False
        )
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, task in zip(axes.flat, panels, strict=False):
            _panel(axis, results, scenario, labels, budgets, task)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=4, frameon=False)
        figure.suptitle(f"{scenario.capitalize()}: accuracy in % against budget")
        figure.tight_layout(rect=(0, 0.04 + 0.14 / rows, 1, 1))
        paths.append(output.with_name(f"{output.stem}_{scenario}.png"))
        # No date or version inside: the same results give the same file.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
        pyplot.close(figure)
    return paths


def _panel(axis, results: Results, scenario: str, labels, budgets, task: str) -> None:
    places = positions(budgets)
    for label in labels:
        found = [results.estimates[Cell(scenario, label, budget)][task] for budget in budgets]
        means = [100 * one.mean for one in found]
        errors = [
            [100 * (one.mean - one.low) for one in found],
            [100 * (one.high - one.mean) for one in found],
        ]
        style = "--" if label.startswith("kvpress ") else ":" if "," in label else "-"
        colour = f"C{sorted(set(map(_base, labels))).index(_base(label))}"
        axis.errorbar(
            places, means, [[max(0, e) for e in side] for side in errors], label=label,
            linestyle=style, color=colour, marker="o", markersize=3, linewidth=1.3, elinewidth=0.6,
        )  # fmt: skip
    axis.axhline(100 * results.full[task].mean, color="black", linewidth=0.8, label=FULL)
    axis.set_title(task)
    axis.set_ylim(-3, 105)
    axis.set_xticks(places, budgets)
    axis.grid(alpha=0.25)


def _base(label: str) -> str:
    """The policy of a label, whoever runs it and with what beside it."""
    return label.removeprefix("kvpress ").split(",")[0]
