"""The panels with one row a layer: pages of each KV head, and where looked-for texts survive."""

from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from vllm_kvevict.tools.inspect.sheet import (
    MARGIN,
    MAX_SIGHTINGS,
    WIDTH,
    Sheet,
    find_colour,
    label_layers,
    letter,
)
from vllm_kvevict.tools.inspect.view import View, shorten

MAX_NUMBERED_CELLS = 320


def draw_pages(sheet: Sheet, view: View, top: float, rows: float) -> None:
    pages = _pages(view)
    layers, heads = pages.shape
    width = _pages_width(view)
    axes = sheet.axes(MARGIN, top - 0.35, width, rows)
    image = axes.imshow(
        pages, aspect="auto", cmap="viridis", norm=Normalize(0, max(pages.max(), 1))
    )
    if pages.size <= MAX_NUMBERED_CELLS:
        size = min(9.0, rows / layers * 36)
        for (layer, head), count in np.ma.ndenumerate(pages):
            ink = "black" if count > 0.6 * pages.max() else "white"
            axes.text(head, layer, count, ha="center", va="center", color=ink, fontsize=size)
    tokens = view.run.config.rule(view.run.block_size).page_tokens
    axes.set_title(f"pages of {tokens} tokens kept per KV head", fontsize=10, loc="left")
    axes.set_xlabel("KV head", fontsize=9)
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    label_layers(axes, view)
    bar = sheet.figure.colorbar(image, cax=sheet.axes(MARGIN + width + 0.1, top - 0.35, 0.12, rows))
    bar.ax.tick_params(labelsize=8)
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()


def draw_sightings(sheet: Sheet, view: View, top: float, rows: float) -> None:
    """Layers by looked-for texts: in how many heads each survived whole, and how much of it."""
    sightings = view.sightings[:MAX_SIGHTINGS]
    if not sightings:
        return
    heads = np.array([len(layer.heads) for layer in view.snapshot.layers])
    whole = np.stack([sighting.whole for sighting in sightings], axis=1)
    held = np.stack([sighting.share for sighting in sightings], axis=1)
    left = MARGIN + _pages_width(view) + 1.5
    width = min(len(sightings) * 0.75, 2.6)
    axes = sheet.axes(left, top - 0.35, width, rows)
    axes.imshow(held, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    if whole.size <= MAX_NUMBERED_CELLS:
        size = min(9.0, rows / len(heads) * 36)
        for (layer, column), count in np.ndenumerate(whole):
            ink = "white" if held[layer, column] > 0.6 else "black"
            text = f"{count}/{heads[layer]}" if sightings[column].cached else "-"
            axes.text(column, layer, text, ha="center", va="center", color=ink, fontsize=size)
    axes.set_title(
        "KV heads that keep it whole (colour: tokens of it kept)", fontsize=10, loc="left"
    )
    axes.set_xticks(range(len(sightings)), [letter(i) for i in range(len(sightings))])
    for index, tick in enumerate(axes.get_xticklabels()):
        tick.set_color(find_colour(index))
        tick.set_fontweight("bold")
    label_layers(axes, view)
    room = int((WIDTH - left - width - 0.5) / 0.078)
    for index, sighting in enumerate(sightings):
        place = f"tokens {sighting.start}-{sighting.stop - 1}"
        if not sighting.cached:
            place += ", after this eviction"
        text = f"{letter(index)}  {shorten(sighting.text, room - 3)}\n    {place}"
        y = top - 0.35 - index * min(0.4, rows / len(sightings))
        sheet.write(left + width + 0.25, y, text, fontsize=9, color=find_colour(index))


def _pages(view: View) -> "np.ma.MaskedArray[Any, Any]":
    """[L, H] pages of each KV head; masked where a layer has fewer heads than another."""
    rows = [layer.pages for layer in view.snapshot.layers]
    heads = max(map(len, rows))
    padded = [[*row, *[-1] * (heads - len(row))] for row in rows]
    return np.ma.masked_equal(padded, -1)


def _pages_width(view: View) -> float:
    """Inches across the heads of the pages panel."""
    return min(max(len(layer.pages) for layer in view.snapshot.layers) * 0.62, 5.6)
