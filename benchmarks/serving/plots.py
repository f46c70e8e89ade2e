"""Figures of the sweep: one a dataset, one panel a quantity, one line a setting."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.sweep import Row

PANELS = (
    ("output tokens/s", "output_tokens_per_s", False),
    ("peak running sequences", "peak_running", False),
    ("preemptions", "preemptions", False),
    ("TTFT p50 (ms)", "ttft_ms_median", True),
    ("TTFT p99 (ms)", "ttft_ms_p99", True),
    ("ITL p50 (ms)", "itl_ms_median", True),
    ("ITL p99 (ms)", "itl_ms_p99", True),
)
COLUMNS = 4


def plot(rows: Sequence[Row], output: Path) -> list[Path]:
    """Write ``<output>_<dataset>.png`` for each dataset; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == dataset]
        lines = -(-len(PANELS) // COLUMNS)
        figure, axes = pyplot.subplots(
            lines, COLUMNS, figsize=(4.0 * COLUMNS, 3.0 * lines), squeeze=False
        )
        for axis, panel in zip(axes.flat, PANELS, strict=False):
            _panel(axis, mine, *panel)
        for axis in axes.flat[len(PANELS) :]:
            axis.remove()
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower right", frameon=False)
        figure.suptitle(f"{dataset}: against KV memory")
        figure.tight_layout()
        paths.append(output.with_name(f"{output.stem}_{dataset}.png"))
        # No date or version inside: the same results give the same file.
        figure.savefig(paths[-1], dpi=100, metadata={"Software": None})
        pyplot.close(figure)
    return paths


def _panel(axis, rows: Sequence[Row], title: str, key: str, logarithmic: bool) -> None:
    for setting in dict.fromkeys(row.setting for row in rows):
        points = [
            (row.kv_bytes / 2**20, row.measured[key]) for row in rows if row.setting == setting
        ]
        style = "k--" if setting == "stock vLLM" else "-"
        axis.plot(*zip(*sorted(points), strict=True), style, marker="o", label=setting)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("KV memory (MiB)", fontsize=9)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    if logarithmic:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
