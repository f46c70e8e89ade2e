"""Joins the parts' JSON files to one, and writes one Markdown file: a verdict for each goal and for
each prediction, then a table for each part.

``python -m benchmarks.gpu.report FOLDER [EARLIER]``: files that FOLDER lacks are those of EARLIER.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.attention import FLASH, TRITON
from benchmarks.gpu.goals import verdicts
from benchmarks.gpu.predictions import prediction_table

PARTS = ("attention", "eviction", "serving", "tune", "store_bits", "real_weights")
ERROR = 200
NOTES = """
- Milliseconds are medians with the middle half of the repetitions, from a flushed L2.
- `attention`: a CUDA graph of a step, lengths, plan and ring writes included, by its layers. The
  verdict is that of the kernel that `auto` serves with (`served by`; the Triton kernel on an
  H100), at the worst budget.
- `eviction`: kernels one by one beside the whole pass. Among 8 ranks the pass has an eighth of the
  heads and sums nothing over ranks; its prefill is an eighth of one GPU's, without all-reduces.
- A prefill is what the engine's clock says, from its scheduling to its first token.
- Weights are random, so in `serving` heads share a budget almost evenly, unlike in `attention`.
- `tune`, `store_bits`, `real_weights`: no goal speaks of them.
- `kv_bytes` of an evicting server are stock's less its observation rings.
"""


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median_ms']:.4f} ({value['low_ms']:.4f} to {value['high_ms']:.4f})"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "-"
    return str(value).replace("\n", " ").replace("|", "/")[-ERROR:]


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(name)) for name in names) + " |")
    return lines


def with_ratios(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals' ratios beside what was measured."""
    # A series is for the file; a table would be as wide as the load is long.
    rows = [{k: v for k, v in row.items() if k != "series"} for row in part["rows"]]
    stock: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row.get("setting") == "stock" and "output_tokens_per_s" in row:
            stock[load(row)] = row["output_tokens_per_s"]
    for row in rows:
        for name in (TRITON, FLASH):
            if name in row and "flash, equal lengths" in row:
                equal = row["flash, equal lengths"]["median_ms"]
                row[f"{name}: speed over flash, equal"] = equal / row[name]["median_ms"]
            if name in row:
                row[f"{name}: share of copy bandwidth"] = row["floor_ms"] / row[name]["median_ms"]
        if "output_tokens_per_s" in row and load(row) in stock and row["setting"] != "stock":
            row["output over stock"] = row["output_tokens_per_s"] / stock[load(row)]
    return rows


def load(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("case", "input", "output", "load"))


def measured(*folders: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of all result files by name, those of other settings included.

    Of files with one name, that of the first folder counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder, name in product(folders, PARTS):
        for path in sorted([*folder.glob(f"{name}.json"), *folder.glob(f"{name}-*.json")]):
            found.setdefault(path.stem, json.loads(path.read_text()) | {"part": name})
    return found


def main(folder: Path, *earlier: Path) -> None:
    every = measured(folder, *earlier)
    parts = {name: every[name] for name in PARTS if name in every}
    (folder / "gpu.json").write_text(json.dumps(parts, indent=1) + "\n")
    lines = ["# GPU benchmarks", "", *verdicts(parts), ""]
    predicted = prediction_table(list(every.values()))
    lines += ["## Predictions", "", *predicted, ""]
    for name, part in parts.items():
        lines += [f"## {name}", "", f"{part['device']}; `{part['provenance']['command']}`, commit "
                  f"{part['provenance']['commit']}, {part['provenance']['date']}.", ""]  # fmt: skip
        lines += [*table(with_ratios(part)), ""]
    (folder / "gpu.md").write_text("\n".join(lines) + NOTES)
    print(*verdicts(parts), "", *predicted, sep="\n")
    print(folder / "gpu.md")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python -m benchmarks.gpu.report FOLDER [EARLIER]")
    main(*map(Path, sys.argv[1:]))
