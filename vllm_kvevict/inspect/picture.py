"""The picture: pages per KV head, positions that survive, and the text of the most kept spans."""

import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from vllm_kvevict.inspect.bins import bin_edges, bin_maxima, bin_means
from vllm_kvevict.inspect.view import View, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 13.0
MARGIN = 0.85
BINS = 1000
MAX_NUMBERED_CELLS = 320
FIND_COLOURS = ("#d62728", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")
SPAN_COLOUR = "#1a7f37"
TAIL_COLOUR = "#b8b8b8"
LINE = 0.19


def draw(view: View, path: Path) -> None:
    """Write the picture of ``view`` as a PNG."""
    layers = len(view.snapshot.layers)
    rows = min(max(layers * 0.3, 1.2), 5.0)
    header = _header(view)
    table = 0.45 + LINE * (len(view.spans) + 1)
    heights = {
        "header": 0.3 + LINE * len(header),
        "pages": rows + 0.85,
        "positions": rows + 0.55,
        "total": 1.75,
        "spans": table if view.spans else 0.1,
    }
    figure = plt.figure(figsize=(WIDTH, sum(heights.values())), dpi=130)
    tops = _stack(heights)
    try:
        _write_header(figure, header, view)
        _draw_pages(figure, view, tops["pages"], rows)
        _draw_sightings(figure, view, tops["pages"], rows)
        positions = _axes(figure, MARGIN, tops["positions"] - 0.35, WIDTH - 2 * MARGIN, rows)
        total = _axes(figure, MARGIN, tops["total"], WIDTH - 2 * MARGIN, 1.2)
        _draw_positions(figure, view, positions)
        _draw_total(view, total)
        _write_spans(figure, view, tops["spans"])
        with warnings.catch_warnings():
            # A script that the font lacks shows as boxes; the report has the text.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(path, format="png")
    finally:
        plt.close(figure)


def _stack(heights: dict[str, float]) -> dict[str, float]:
    """Top edge of each part in inches from the bottom of the figure."""
    tops, top = {}, sum(heights.values())
    for name, height in heights.items():
        tops[name] = top
        top -= height
    return tops


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Axes placed in inches: left edge, top edge, size."""
    total = figure.get_figheight()
    return figure.add_axes((left / WIDTH, (top - height) / total, width / WIDTH, height / total))


def _write(figure: "Figure", left: float, top: float, text: str, **style: Any) -> None:
    figure.text(
        left / WIDTH, top / figure.get_figheight(), text, va="top", parse_math=False, **style
    )


def _header(view: View) -> list[str]:
    run, snapshot = view.run, view.snapshot
    lines = [
        f"prompt of {len(run.prompt.ids)} tokens, {view.moment};  "
        f"blocks of {run.block_size}: {snapshot.blocks_before} before the eviction, "
        f"{snapshot.blocks_after} after;  {run.evictions} evictions in all"
    ]
    answer = shorten(run.answer.strip(), 420)
    return lines + textwrap.wrap(f"answer: {answer}", 150)[:3]


def _write_header(figure: "Figure", lines: list[str], view: View) -> None:
    top = figure.get_figheight() - 0.12
    model = Path(view.options.model).name or view.options.model
    _write(figure, MARGIN, top, f"{model}:  {view.policy}", fontsize=13, fontweight="bold")
    _write(figure, MARGIN, top - 0.27, "\n".join(lines), fontsize=9.5, linespacing=1.35)


def _draw_pages(figure: "Figure", view: View, top: float, rows: float) -> None:
    pages = _pages(view)
    layers, heads = pages.shape
    width = _pages_width(view)
    axes = _axes(figure, MARGIN, top - 0.35, width, rows)
    image = axes.imshow(
        pages, aspect="auto", cmap="viridis", norm=Normalize(0, max(pages.max(), 1))
    )
    if pages.size <= MAX_NUMBERED_CELLS:
        size = min(9.0, rows / layers * 36)
        for (layer, head), count in np.ma.ndenumerate(pages):
            ink = "black" if count > 0.6 * pages.max() else "white"
            axes.text(head, layer, count, ha="center", va="center", color=ink, fontsize=size)
    axes.set_title(
        f"pages of {view.run.block_size} tokens kept per KV head", fontsize=10, loc="left"
    )
    axes.set_xlabel("KV head", fontsize=9)
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    _label_layers(axes, view)
    bar = figure.colorbar(image, cax=_axes(figure, MARGIN + width + 0.1, top - 0.35, 0.12, rows))
    bar.ax.tick_params(labelsize=8)
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()


def _draw_sightings(figure: "Figure", view: View, top: float, rows: float) -> None:
    """Layers by looked-for texts: in how many heads each survived whole, and how much of it."""
    sightings = view.sightings[:8]
    if not sightings:
        return
    heads = np.array([len(layer.heads) for layer in view.snapshot.layers])
    whole = np.stack([sighting.whole for sighting in sightings], axis=1)
    held = np.stack([sighting.share for sighting in sightings], axis=1)
    left = MARGIN + _pages_width(view) + 1.5
    width = min(len(sightings) * 0.75, 2.6)
    axes = _axes(figure, left, top - 0.35, width, rows)
    axes.imshow(held, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    if whole.size <= MAX_NUMBERED_CELLS:
        size = min(9.0, rows / len(heads) * 36)
        for (layer, column), count in np.ndenumerate(whole):
            ink = "white" if held[layer, column] > 0.6 else "black"
            text = f"{count}/{heads[layer]}"
            axes.text(column, layer, text, ha="center", va="center", color=ink, fontsize=size)
    axes.set_title(
        "KV heads that keep it whole (colour: tokens of it kept)", fontsize=10, loc="left"
    )
    axes.set_xticks(range(len(sightings)), [_letter(i) for i in range(len(sightings))])
    for index, tick in enumerate(axes.get_xticklabels()):
        tick.set_color(_find_colour(index))
        tick.set_fontweight("bold")
    _label_layers(axes, view)
    room = int((WIDTH - left - width - 0.5) / 0.078)
    for index, sighting in enumerate(sightings):
        place = f"tokens {sighting.start}-{sighting.stop - 1}"
        if not sighting.cached:
            place += ", behind this eviction"
        text = f"{_letter(index)}  {shorten(sighting.text, room - 3)}\n    {place}"
        y = top - 0.35 - index * min(0.4, rows / len(sightings))
        _write(figure, left + width + 0.25, y, text, fontsize=9, color=_find_colour(index))


def _draw_positions(figure: "Figure", view: View, axes: "Axes") -> None:
    snapshot, n = view.snapshot, view.snapshot.num_tokens
    heads = np.array([len(layer.heads) for layer in snapshot.layers])
    shares = snapshot.counts() / heads[:, None]
    edges = bin_edges(0, n, BINS)
    binned = bin_means(shares, edges)
    front = binned[:, edges[:-1] < snapshot.tail_start]
    # A long prompt keeps little of each bin: let the colours end where its values do.
    top = float(np.quantile(front, 0.995)) if front.size else 1.0
    layers = np.arange(len(heads) + 1) - 0.5
    mesh = axes.pcolormesh(edges, layers, binned, cmap="Blues", vmin=0, vmax=max(top, 0.05))
    axes.invert_yaxis()
    _label_layers(axes, view)
    width = int(edges[1] - edges[0])
    per = "per position" if width == 1 else f"mean of {width} positions"
    axes.set_title(
        f"share of the layer's KV heads that hold a position of the prompt ({per})",
        fontsize=10, loc="left",
    )  # fmt: skip
    bounds = axes.get_position()
    bar = figure.colorbar(
        mesh,
        cax=figure.add_axes((bounds.x1 + 0.1 / WIDTH, bounds.y0, 0.12 / WIDTH, bounds.height)),
        extend="max" if top < 1 else "neither",
        format=lambda share, _: f"{share:.0%}",
    )
    bar.ax.tick_params(labelsize=8)
    axes.tick_params(labelbottom=False)
    _mark(view, axes, labels=True)


def _draw_total(view: View, axes: "Axes") -> None:
    snapshot, n = view.snapshot, view.snapshot.num_tokens
    shares = snapshot.counts().sum(0) / snapshot.num_heads
    edges = bin_edges(0, n, BINS)
    axes.stairs(bin_maxima(shares, edges), edges, color="#9ecae1", linewidth=0.8)
    axes.stairs(bin_means(shares, edges), edges, fill=True, color="#3182bd")
    mean = float(shares[: snapshot.tail_start].mean())
    axes.plot([0, snapshot.tail_start], [mean, mean], color="black", linewidth=0.9, dashes=(5, 3))
    axes.text(
        0.006 * n, mean + 0.03, f"budget {view.run.budget}: {mean:.0%} kept on average", fontsize=8,
        bbox=dict(facecolor="white", alpha=0.75, linewidth=0, pad=1),
    )  # fmt: skip
    axes.set_ylim(0, 1.14)
    axes.set_xlim(0, n)
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"], fontsize=8)
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
    if config.policy == "streaming-llm" and config.sinks:
        axes.axvline(config.sinks, color=SPAN_COLOUR, linewidth=0.9)
        if labels:
            _above(axes, config.sinks, f"{config.sinks} sinks", SPAN_COLOUR, n)
    for index, sighting in enumerate(view.sightings[:8]):
        if sighting.start >= n:
            continue
        middle, colour = (sighting.start + sighting.stop) / 2, _find_colour(index)
        thin = max(sighting.stop - sighting.start, n / 500)
        axes.axvspan(middle - thin / 2, middle + thin / 2, color=colour, alpha=0.3, linewidth=0)
        if labels:
            axes.annotate(
                _letter(index), (middle, 0), (0, -2), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="top", fontsize=9, color=colour,
                fontweight="bold", annotation_clip=False,
            )  # fmt: skip


def _above(axes: "Axes", x: float, text: str, colour: str, n: int, raised: bool = False) -> None:
    """A label on the top edge of the axes, inside the picture also at its right end."""
    axes.annotate(
        text, (x, 1), (0, 13 if raised else 2), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if x > 0.8 * n else "left", va="bottom",
        fontsize=8, color=colour,
    )  # fmt: skip


def _write_spans(figure: "Figure", view: View, top: float) -> None:
    if not view.spans:
        return
    _write(figure, MARGIN, top - 0.05, "most kept spans in front of the tail", fontsize=10)
    style = dict(fontsize=8.5, family="monospace")
    _write(figure, MARGIN, top - 0.27, f"{'':2} {'positions':>13} {'heads':>6}  text", **style)
    for number, span in enumerate(view.spans, 1):
        place = f"{span.start}-{span.stop - 1}"
        text = f"   {place:>13} {span.share:>6.0%}  {view.text(span.start, span.stop, 120)}"
        y = top - 0.27 - number * LINE
        _write(figure, MARGIN, y, text, **style)
        _write(figure, MARGIN, y, f"{number:>2}", fontweight="bold", color=SPAN_COLOUR, **style)


def _pages(view: View) -> "np.ma.MaskedArray[Any, Any]":
    """[L, H] pages of each KV head; masked where a layer has fewer heads than another."""
    rows = [layer.pages for layer in view.snapshot.layers]
    heads = max(map(len, rows))
    padded = [[*row, *[-1] * (heads - len(row))] for row in rows]
    return np.ma.masked_equal(padded, -1)


def _pages_width(view: View) -> float:
    """Inches across the heads of the pages panel."""
    return min(max(len(layer.pages) for layer in view.snapshot.layers) * 0.62, 5.6)


def _label_layers(axes: "Axes", view: View) -> None:
    indices = [layer.index for layer in view.snapshot.layers]
    step = max(1, -(-len(indices) // 16))
    axes.set_yticks(range(0, len(indices), step), [str(i) for i in indices[::step]])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("layer", fontsize=9)


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _find_colour(index: int) -> str:
    return FIND_COLOURS[index % len(FIND_COLOURS)]
