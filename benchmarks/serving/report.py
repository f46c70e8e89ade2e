"""The sweep as JSON and as Markdown tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.provenance import sentence
from benchmarks.serving.options import Options
from benchmarks.serving.sweep import Row

COLUMNS = (
    ("output tokens/s", "output_tokens_per_s", "{:.0f}"),
    ("TTFT p50", "ttft_ms_median", "{:.0f}"),
    ("TTFT p99", "ttft_ms_p99", "{:.0f}"),
    ("ITL p50", "itl_ms_median", "{:.1f}"),
    ("ITL p99", "itl_ms_p99", "{:.1f}"),
    ("peak sequences", "peak_running", "{:.0f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("evictions", "evictions", "{:.0f}"),
    ("postponed", "postponed", "{:.0f}"),
)


def write_json(path: Path, options: Options, rows: Sequence[Row], origin: dict) -> None:
    """Everything that was measured, with its origin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = origin | dict(
        options=options.model_dump(mode="json"), rows=[asdict(row) for row in rows]
    )
    path.write_text(json.dumps(content, indent=2) + "\n")


def markdown(options: Options, rows: Sequence[Row], origin: dict) -> str:
    """One table for each dataset; the fastest setting of each memory stands in bold."""
    out = [
        "# Serving under load",
        "",
        f"{sentence(origin)} One run of each cell.",
        "",
        f"Prompts of up to {options.prompt} tokens, answers of up to {options.output}, "
        f"{options.requests} requests, {options.concurrency} at once (the trace at its own times, "
        f"{options.rate:g} a second on average), float32, blocks of {options.block_size} tokens. "
        "Memory is counted in full requests that fit without eviction. Times in ms.",
    ]
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == dataset]
        out += ["", f"## {dataset}", ""]
        out.append("| memory | MiB | setting | " + " | ".join(c[0] for c in COLUMNS) + " |")
        out.append("| ---: | ---: | --- |" + " ---: |" * len(COLUMNS))
        for memory in dict.fromkeys(row.memory for row in mine):
            group = [row for row in mine if row.memory == memory]
            best = max(row.measured["output_tokens_per_s"] for row in group)
            out += [_line(row, best) for row in group]
    return "\n".join(out) + "\n"


def _line(row: Row, best: float) -> str:
    cells = [form.format(row.measured[key]) for _, key, form in COLUMNS]
    if row.measured["output_tokens_per_s"] == best:
        cells[0] = f"**{cells[0]}**"
    mib = f"{row.kv_bytes / 2**20:.1f}"
    return f"| {row.memory} | {mib} | {row.setting} | " + " | ".join(cells) + " |"
