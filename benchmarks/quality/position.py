"""One picture of fidelity results: what is lost against the position in the answer.

python -m benchmarks.quality.position RESULT.json ... docs/long-answers.png
"""

import argparse
import json
from pathlib import Path

from benchmarks.quality.cell import FULL


def label(entry: dict, options: dict) -> str:
    """The line that a cell of a result belongs to."""
    return entry["label"] + (", with profile" if options["layers"] != "None" else "")


def draw(results: list[dict], output: Path) -> None:
    """Draw the excess of the NLL with 95% intervals, a panel a budget, a line a policy.

    Args:
        results: Contents of result files of ``python -m benchmarks.quality.fidelity``.
        output: The PNG.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, str], list[dict]] = {}
    for result in results:
        for entry in result["cells"]:
            if entry["label"] != FULL:
                key = entry["budget"], label(entry, result["options"])
                lines.setdefault(key, []).append(entry)
    budgets = list(dict.fromkeys(budget for budget, _ in lines))
    labels = list(dict.fromkeys(name for _, name in lines))
    figure, axes = pyplot.subplots(
        1, len(budgets), figsize=(5 * len(budgets), 3.6), sharey=True, squeeze=False
    )
    for axis, budget in zip(axes[0], budgets, strict=True):
        axis.axhline(0, color="black", linewidth=0.9, label=FULL)
        for index, name in enumerate(labels):
            found = lines.get((budget, name), [])
            # A little aside, or intervals at the same place hide one another.
            places = [
                (one["first"] + one["last"]) / 2
                + (index - len(labels) / 2) * 0.08 * (one["last"] - one["first"])
                for one in found
            ]
            means = [one["excess"]["mean"] for one in found]
            errors = [
                [max(0, one["excess"]["mean"] - one["excess"]["low"]) for one in found],
                [max(0, one["excess"]["high"] - one["excess"]["mean"]) for one in found],
            ]
            axis.errorbar(
                places, means, errors, label=name, color=f"C{index}", marker="o",
                markersize=4, elinewidth=0.8, capsize=2,
            )  # fmt: skip
        axis.set_title(f"budget {budget}", fontsize=10)
        axis.set_xlabel("token of the answer", fontsize=9)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("NLL beyond the full cache's, nats a token", fontsize=9)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.position")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw([json.loads(path.read_text()) for path in options.results], options.output)


if __name__ == "__main__":
    main()
