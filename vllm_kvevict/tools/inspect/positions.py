"""The panels with positions on x: what survives in each layer, and in all heads together."""

from typing import TYPE_CHECKING

import numpy as np

from vllm_kvevict.tools.inspect.bins import bin_edges, bin_maxima, bin_means
from vllm_kvevict.tools.inspect.sheet import (
    MAX_SIGHTINGS,
    SPAN_COLOUR,
    WIDTH,
    Sheet,
    find_colour,
    label_layers,
    letter,
)
from vllm_kvevict.tools.inspect.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 1000
ROOT_SCALE_BELOW = 0.05
TAIL_COLOUR = "#b8b8b8"


def draw_positions(sheet: Sheet, view: View, axes: "Axes") -> None:
    snapshot, n = view.snapshot, view.snapshot.num_tokens
    heads = np.array([len(layer.heads) for layer in snapshot.layers])
    shares = snapshot.counts() / heads[:, None]
    edges = bin_edges(0, n, BINS)
    binned = bin_means(shares, edges)
    front = binned[:, edges[:-1] < snapshot.tail_start]
    # A long prompt keeps little of each bin: let the colours end where its values do.
    top = float(np.quantile(front, 0.995)) if front.size else 1.0
    layers = np.arange(len(heads) + 1) - 0.5
    mesh = axes.pcolormesh(edges, layers, binned, cmap="Blues", vmin=0, vmax=max(top, 0.01))
    axes.invert_yaxis()
    label_layers(axes, view)
    width = int(edges[1] - edges[0])
    per = "per position" if width == 1 else f"mean of {width} positions"
    axes.set_title(
        f"share of the layer's KV heads that hold a position of the prompt ({per})",
        fontsize=10, loc="left",
    )  # fmt: skip
    bounds = axes.get_position()
    bar = sheet.figure.colorbar(
        mesh,
        cax=sheet.figure.add_axes(
            (bounds.x1 + 0.1 / WIDTH, bounds.y0, 0.12 / WIDTH, bounds.height)
        ),
        extend="max" if top < 1 else "neither",
        format=lambda share, _: f"{share:.0%}",
    )
    bar.ax.tick_params(labelsize=8)
    axes.tick_params(labelbottom=False)
    _mark(view, axes, labels=True)


def draw_total(view: View, axes: "Axes") -> None:
    snapshot, n = view.snapshot, view.snapshot.num_tokens
    shares = snapshot.counts().sum(0) / snapshot.num_heads
    edges = bin_edges(0, n, BINS)
    axes.stairs(bin_maxima(shares, edges), edges, color="#9ecae1", linewidth=0.8)
    axes.stairs(bin_means(shares, edges), edges, fill=True, color="#3182bd")
    mean = float(shares[: snapshot.tail_start].mean())
    axes.plot([0, snapshot.tail_start], [mean, mean], color="black", linewidth=0.9, dashes=(5, 3))
    config = view.run.config
    sinks = f" ({config.options.sinks} sinks)" if config.policy == "streaming-llm" else ""
    axes.annotate(
        f"budget {view.run.budget}{sinks}: {mean:.0%} kept on average", (0.006 * n, mean), (0, 3),
        textcoords="offset points", fontsize=8,
        bbox=dict(facecolor="white", alpha=0.75, linewidth=0, pad=1),
    )  # fmt: skip
    if mean < ROOT_SCALE_BELOW:
        axes.set_yscale("function", functions=(lambda y: np.sqrt(np.abs(y)), np.square))
    axes.set_ylim(0, 1.2)
    axes.set_xlim(0, n)
    ticks = [0, 0.01, 0.1, 0.5, 1] if mean < ROOT_SCALE_BELOW else [0, 0.5, 1]
    axes.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks], fontsize=8)
    axes.set_ylabel("of all heads", fontsize=9)
    axes.set_xlabel("position in the prompt (tokens)", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for number, span in enumerate(view.spans, 1):
        height = float(shares[span.start : span.stop].max())
        axes.annotate(
            str(number), ((span.start + span.stop) / 2, min(height, 1.0)), ha="center",
            va="bottom", fontsize=8, fontweight="bold", color=SPAN_COLOUR,
        )  # fmt: skip
    _mark(view, axes, labels=False)


def _mark(view: View, axes: "Axes", labels: bool) -> None:
    """Tail, sinks, end of the prompt and the looked-for texts."""
    snapshot, n = view.snapshot, view.snapshot.num_tokens
    prompt, config = len(view.run.prompt.ids), view.run.config
    axes.set_xlim(0, n)
    axes.axvline(snapshot.tail_start, color="black", linewidth=0.9)
    axes.axvline(n - config.window, color="black", linewidth=0.9, linestyle=":")
    if labels:
        _above(axes, n, f"tail, with the window of {config.window} (dotted)", "black", n)
    if prompt < n:
        axes.axvline(prompt, color=SPAN_COLOUR, linewidth=1.2, linestyle="--")
        if labels:
            _above(axes, prompt, "generated →", SPAN_COLOUR, n, raised=prompt > 0.6 * n)
    if not labels:
        axes.axvspan(snapshot.tail_start, n, color=TAIL_COLOUR, alpha=0.45, linewidth=0)
    if config.policy == "streaming-llm" and config.options.sinks:
        axes.axvline(config.options.sinks, color=SPAN_COLOUR, linewidth=0.9)
    taken: list[float] = []
    for index, sighting in enumerate(view.sightings[:MAX_SIGHTINGS]):
        if sighting.start >= n:
            continue
        middle, colour = (sighting.start + sighting.stop) / 2, find_colour(index)
        thin = max(sighting.stop - sighting.start, n / 500)
        axes.axvspan(middle - thin / 2, middle + thin / 2, color=colour, alpha=0.3, linewidth=0)
        if labels:
            near = sum(abs(middle - other) < 0.015 * n for other in taken)
            axes.annotate(
                letter(index), (middle, 0), (9 * near, -2), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="top", fontsize=9, color=colour,
                fontweight="bold", annotation_clip=False,
            )  # fmt: skip
            taken.append(middle)


def _above(axes: "Axes", x: float, text: str, colour: str, n: int, raised: bool = False) -> None:
    """A label on the top edge of the axes, inside the picture also at its right end."""
    axes.annotate(
        text, (x, 1), (0, 13 if raised else 2), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if x > 0.8 * n else "left", va="bottom",
        fontsize=8, color=colour,
    )  # fmt: skip
