"""The picture: pages per KV head, positions that survive, and the text of the most kept spans."""

import textwrap
import warnings
from pathlib import Path
from typing import Any

from vllm_kvevict.tools.inspect.heads import draw_pages, draw_sightings
from vllm_kvevict.tools.inspect.positions import draw_positions, draw_total
from vllm_kvevict.tools.inspect.sheet import LINE, MARGIN, SPAN_COLOUR, WIDTH, Sheet, plt
from vllm_kvevict.tools.inspect.view import View, shorten


def draw(view: View, path: Path) -> None:
    """Write the picture of ``view`` as a PNG."""
    rows = min(max(len(view.snapshot.layers) * 0.3, 1.2), 5.0)
    header = _header(view)
    sheet = Sheet(
        {
            "header": 0.3 + LINE * len(header),
            "pages": rows + 0.85,
            "positions": rows + 0.55,
            "total": 1.75,
            "spans": 0.45 + LINE * (len(view.spans) + 1) if view.spans else 0.1,
        }
    )
    tops, width = sheet.tops, WIDTH - 2 * MARGIN
    try:
        _write_header(sheet, header, view)
        draw_pages(sheet, view, tops["pages"], rows)
        draw_sightings(sheet, view, tops["pages"], rows)
        draw_positions(sheet, view, sheet.axes(MARGIN, tops["positions"] - 0.35, width, rows))
        draw_total(view, sheet.axes(MARGIN, tops["total"], width, 1.2))
        _write_spans(sheet, view, tops["spans"])
        with warnings.catch_warnings():
            # A script that the font lacks shows as boxes; the report has the text.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            sheet.figure.savefig(path, format="png")
    finally:
        plt.close(sheet.figure)


def _header(view: View) -> list[str]:
    run, snapshot = view.run, view.snapshot
    lines = [
        f"prompt of {len(run.prompt.ids)} tokens, {view.moment};  "
        f"blocks of {run.block_size}: {snapshot.blocks_before} before the eviction, "
        f"{snapshot.blocks_after} after;  {view.evictions}"
    ]
    answer = shorten(run.answer.strip(), 420)
    return lines + textwrap.wrap(f"answer: {answer}", 140)[:3]


def _write_header(sheet: Sheet, lines: list[str], view: View) -> None:
    top = sheet.height - 0.12
    model = Path(view.options.model).name or view.options.model
    sheet.write(MARGIN, top, f"{model}:  {view.policy}", fontsize=13, fontweight="bold")
    sheet.write(MARGIN, top - 0.27, "\n".join(lines), fontsize=9.5, linespacing=1.35)


def _write_spans(sheet: Sheet, view: View, top: float) -> None:
    if not view.spans:
        return
    sheet.write(MARGIN, top - 0.05, "most kept spans in front of the tail", fontsize=10)
    style: dict[str, Any] = dict(fontsize=8.5, family="monospace")
    sheet.write(MARGIN, top - 0.27, f"{'':2} {'positions':>13} {'heads':>6}  text", **style)
    for number, span in enumerate(view.spans, 1):
        place = f"{span.start}-{span.stop - 1}"
        text = f"   {place:>13} {span.share:>6.0%}  {view.text(span.start, span.stop, 120)}"
        y = top - 0.27 - number * LINE
        sheet.write(MARGIN, y, text, **style)
        sheet.write(MARGIN, y, f"{number:>2}", fontweight="bold", color=SPAN_COLOUR, **style)
