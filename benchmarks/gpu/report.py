"""Joins the parts' JSON files to one, and writes one Markdown file: a verdict for each goal, then a
table for each part.

``python -m benchmarks.gpu.report FOLDER``
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import verdicts

PARTS = ("attention", "eviction", "serving")


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median_ms']:.3f} ({value['low_ms']:.3f} to {value['high_ms']:.3f})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(name)) for name in names) + " |")
    return lines


def with_ratios(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals' ratios beside what was measured."""
    rows = [dict(row) for row in part["rows"]]
    stock: dict[tuple[Any, ...], float] = {}
    for row in rows:
        for name in ("triton", "flash per head"):
            if name in row and "flash, equal lengths" in row:
                equal = row["flash, equal lengths"]["median_ms"]
                row[f"{name}: speed over flash, equal"] = equal / row[name]["median_ms"]
            if name in row:
                row[f"{name}: share of copy bandwidth"] = row["floor_ms"] / row[name]["median_ms"]
        if "setting" in row:
            key = (row["case"], row["input"], row.get("output"))
            if row["setting"] == "stock":
                stock[key] = row["output_tokens_per_s"]
            elif stock.get(key):
                row["output over stock"] = row["output_tokens_per_s"] / stock[key]
    return rows


def main(folder: Path) -> None:
    parts = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
    if not parts:
        raise SystemExit(f"error: {folder} holds none of {', '.join(PARTS)} as .json")
    (folder / "gpu.json").write_text(json.dumps(parts, indent=1) + "\n")
    lines = ["# GPU benchmarks", "", *verdicts(parts), ""]
    for name, part in parts.items():
        lines += [f"## {name}", "", f"{part['device']}; `{part['provenance']['command']}`, commit "
                  f"{part['provenance']['commit']}, {part['provenance']['date']}.", ""]  # fmt: skip
        if "copy_bytes_per_s" in part:
            lines += [f"Copy bandwidth {part['copy_bytes_per_s'] / 1e9:.0f} GB/s.", ""]
        lines += [*table(with_ratios(part)), ""]
    lines += [
        "Milliseconds are medians with the middle half of the repetitions, from a flushed L2."
    ]
    (folder / "gpu.md").write_text("\n".join(lines) + "\n")
    print(*verdicts(parts), sep="\n")
    print(folder / "gpu.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.gpu.report FOLDER")
    main(Path(sys.argv[1]))
