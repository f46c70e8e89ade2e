"""The rows as one Markdown table."""

from collections.abc import Sequence
from typing import Any

from benchmarks.alternatives.options import TASKS
from benchmarks.alternatives.ways import STOCK
from benchmarks.provenance import sentence
from benchmarks.quality.prompt import AGNOSTIC, AWARE
from benchmarks.quality.table import row

NOT_MEASURED = "not measured"
CANNOT_SERVE = "cannot serve"
SCENARIOS = ((AGNOSTIC, "not known"), (AWARE, "known"))
COLUMNS = (
    ("sequences at once", "peak_running", 1.0, "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", 1.0, "{:.1f}"),
    ("TTFT p50 (s)", "ttft_ms_median", 1e-3, "{:.1f}"),
    ("TTFT p99 (s)", "ttft_ms_p99", 1e-3, "{:.1f}"),
    ("TPOT p50 (ms)", "tpot_ms_median", 1.0, "{:.0f}"),
    ("TPOT p99 (ms)", "tpot_ms_p99", 1.0, "{:.0f}"),
)
"""Title, key of :func:`benchmarks.load.measure`, factor, and format of the load's columns."""


def ratios(load: dict[str, float], stock: dict[str, float]) -> dict[str, float]:
    """Return a load relative to stock vLLM, without the columns in which stock has 0."""
    return {key: load[key] / stock[key] for _, key, *_ in COLUMNS if stock[key]}


def markdown(result: dict[str, Any]) -> str:
    """Return the report of a result.

    Args:
        result: Fields of :func:`benchmarks.provenance.provenance`, ``model``, ``options`` and
            ``rows``, of which one is stock vLLM's.

    """
    options, rows = result["options"], result["rows"]
    tasks = TASKS if int(options["samples"]) else ()
    stock = next(one["load"] for one in rows if one["key"] == STOCK.key)
    lines = [
        "# Alternatives at equal memory",
        "",
        sentence(result),
        "",
        f"KV-cache memory: {options['memory']} (whole requests of {options['prompt']} + "
        f"{options['output_tokens']} tokens in {options['dtype']}, or bytes). Load: "
        f"{options['requests']} such requests, all at once; relative to stock vLLM in parentheses."
        + (
            " float32 stands for 16 bits, so that rows with an FP8 cache have half of the bytes."
            if options["dtype"] == "float32"
            else ""
        )
        + (
            f" Answers: accuracy in percent with 95% intervals, {options['samples']} samples of "
            f"{options['length']} tokens in each cell, question not known or known at the "
            "eviction. Without eviction both are the same answers."
            if tasks
            else ""
        ),
        "",
        row(
            "",
            "kept",
            *(f"`{task}`, {name}" for task in tasks for _, name in SCENARIOS),
            "KV tokens",
            *(title for title, *_ in COLUMNS),
        ),
        row("---", "---", *["---:"] * (2 * len(tasks) + 1 + len(COLUMNS))),
    ]
    lines += [_line(one, stock, tasks) for one in rows]
    failed = [one for one in rows if "error" in one]
    if failed:
        lines += ["", "Did not start, with vLLM's error:", ""]
        lines += [f"- {one['title']}: {one['error']}" for one in failed]
    if cited := next((one["cited"] for one in rows if one.get("cited")), None):
        lines += ["", f"The answers of kvpress are those of {cited}, which is another run."]
    return "\n".join(lines) + "\n"


def _line(one: dict[str, Any], stock: dict[str, float], tasks: Sequence[str]) -> str:
    if "error" in one:
        cells = ["did not start"] * (2 * len(tasks) + 1 + len(COLUMNS))
        return row(one["title"], "", *cells)
    answers = [_accuracy(one["answers"].get(task, {}).get(name)) for task in tasks
               for name, _ in SCENARIOS]  # fmt: skip
    kept = one["budget"] or "100%"
    if "load" not in one:
        return row(one["title"], kept, *answers, *[CANNOT_SERVE] * (1 + len(COLUMNS)))
    relative = ratios(one["load"], stock)
    cells = [form.format(factor * one["load"][key]) + (f" ({relative[key]:.2f}x)" if key in relative
             else "") for _, key, factor, form in COLUMNS]  # fmt: skip
    tokens = f"{one['capacity_tokens']:,}" if one["capacity_tokens"] else NOT_MEASURED
    return row(one["title"], kept, *answers, tokens, *cells)


def _accuracy(found: dict[str, float] | None) -> str:
    if found is None:
        return NOT_MEASURED
    return f"{100 * found['mean']:.0f} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"
