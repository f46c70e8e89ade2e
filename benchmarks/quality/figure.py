"""One picture of a result: accuracy against budget, a row a task, a column a scenario.

python -m benchmarks.quality.figure RESULT.json ... docs/real-model.png
"""

import argparse
import json
from pathlib import Path

from benchmarks.quality.cell import FULL
from benchmarks.quality.plots import positions
from benchmarks.quality.prompt import SCENARIOS


def draw(results: list[dict], output: Path) -> None:
    """Draw cells with 95% intervals; a later result only adds what earlier ones lack.

    Args:
        results: Contents of result files of ``python -m benchmarks.quality``.
        output: The PNG.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells: dict[tuple[str, str, str, str], dict] = {}
    for result in results:
        for cell in result["cells"]:
            key = cell["task"], cell["scenario"], cell["label"], cell["budget"]
            cells.setdefault(key, cell)
    tasks = list(dict.fromkeys(task for result in results for task in result["tasks"]))
    budgets = sorted({key[3] for key in cells if key[3]}, key=lambda b: positions([b])[0])
    labels = list(dict.fromkeys(key[2] for key in cells if key[3]))
    figure, axes = pyplot.subplots(
        len(tasks), len(SCENARIOS), figsize=(10, 3.1 * len(tasks)), sharex=True, sharey=True,
        squeeze=False,
    )  # fmt: skip
    for row, task in enumerate(tasks):
        for column, scenario in enumerate(SCENARIOS):
            axis = axes[row, column]
            full = cells[task, "", FULL, ""]
            axis.axhline(100 * full["mean"], color="black", linewidth=0.9, label=FULL)
            for index, label in enumerate(labels):
                found = [
                    (place, cells[task, scenario, label, budget])
                    for place, budget in zip(positions(budgets), budgets, strict=True)
                    if (task, scenario, label, budget) in cells
                ]
                if not found:
                    continue
                means = [100 * cell["mean"] for _, cell in found]
                errors = [
                    [max(0, 100 * (cell["mean"] - cell["low"])) for _, cell in found],
                    [max(0, 100 * (cell["high"] - cell["mean"])) for _, cell in found],
                ]
                # A little aside, or intervals at the same budget hide one another.
                places = [place + (index - len(labels) / 2) * 0.35 for place, _ in found]
                axis.errorbar(
                    places, means, errors, label=label, color=f"C{index}", marker="o",
                    markersize=4, elinewidth=0.8, capsize=2,
                    linestyle="none" if label.startswith("kvpress") else "-",
                )  # fmt: skip
            axis.set_title(f"{task}, {scenario}", fontsize=10)
            axis.set_ylim(-3, 105)
            axis.set_xticks(positions(budgets), budgets)
            axis.set_xlim(positions(budgets)[0] - 6, positions(budgets)[-1] + 6)
            axis.grid(alpha=0.25)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.supylabel("accuracy in %", fontsize=10)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.figure")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw([json.loads(path.read_text()) for path in options.results], options.output)


if __name__ == "__main__":
    main()
