"""A figure of a run: one panel a quantity over simulated time, one line a setting."""

from pathlib import Path
from typing import Any

PANELS = (
    ("running sequences", "running"),
    ("share of the blocks in use", "used"),
    ("tokens sampled", "sampled"),
    ("preemptions", "preemptions"),
    ("evictions", "evictions"),
)


def plot(results: dict[str, Any], title: str, path: Path) -> None:
    """Write the figure as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(3.6 * len(PANELS), 3.4))
    for axis, (name, key) in zip(axes, PANELS, strict=True):
        for setting, one in results.items():
            style = "k--" if setting == "stock" else "-"
            axis.plot(one["series"]["seconds"], one["series"][key], style, label=setting)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("simulated seconds", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    # No date or version inside: the same results give the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)
