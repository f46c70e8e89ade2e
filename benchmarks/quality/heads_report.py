"""Tables of what sharing budget between heads changes: JSON and Markdown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.provenance import provenance
from benchmarks.quality.intervals import Estimate, estimate_average, estimate_difference
from benchmarks.quality.table import percent, points, row

EQUAL = "equal"


def summarise(results: Mapping[str, Sequence[dict]]) -> list[dict]:
    """One entry a cell, averaged over tasks with the same weight.

    Args:
        results: What :func:`benchmarks.quality.heads.measure` returned, by task. Cells that some
            prompt was too short for are left out.

    """
    every = [set(one["cells"]) for found in results.values() for one in found]
    names = [
        name for name in next(iter(results.values()))[0]["cells"] if all(name in e for e in every)
    ]
    entries = []
    for name in names:
        scenario, budget, split = name.split("/")

        def groups(cell: str, key: str) -> list[list[float]]:
            return [[one["cells"][cell][key] for one in found] for found in results.values()]

        needles = [
            [fmean(one["cells"][name]["needle"]) for one in found if "needle" in one["cells"][name]]
            for found in results.values()
        ]
        base = groups(f"{scenario}/{budget}/{EQUAL}", "score")
        entries.append(
            {
                "scenario": scenario, "budget": f"{budget}%", "split": split,
                "accuracy": vars(estimate_average(groups(name, "score"))),
                "minus_equal": vars(estimate_difference(groups(name, "score"), base)),
                "attention_kept": fmean(map(fmean, groups(name, "attention"))),
                "pages_moved": fmean(map(fmean, groups(name, "moved"))),
                "heads_with_needle": fmean(map(fmean, filter(None, needles))),
            }
        )  # fmt: skip
    return entries


def head_spread(results: Mapping[str, Sequence[dict]], scenario: str) -> list[list[float]]:
    """[L][H]: median over prompts of the share of tokens that holds 90% of a head's attention."""
    found = [one["spread"][scenario] for group in results.values() for one in group]
    return [
        [median(one[layer][head] for one in found) for head in range(len(found[0][0]))]
        for layer in range(len(found[0]))
    ]


def write_report(
    output: Path, results: Mapping[str, Sequence[dict]], settings: dict, splits: list[dict]
) -> None:
    """Write ``output`` (JSON) and the Markdown beside it."""
    entries = summarise(results)
    spreads = {s: head_spread(results, s) for s in dict.fromkeys(e["scenario"] for e in entries)}
    data = {
        "provenance": provenance(), "settings": settings, "splits": splits,
        "samples": {task: len(found) for task, found in results.items()},
        "head_spread": spreads, "cells": entries,
    }  # fmt: skip
    output.write_text(json.dumps(data, indent=1) + "\n")
    lines = [
        "# What sharing budget between heads changes", "",
        f"`{data['provenance']['command']}`, {data['provenance']['date']}, "
        f"commit {data['provenance']['commit']}, {data['provenance']['machine']}.",
        f"Samples: {', '.join(f'{n} {task}' for task, n in data['samples'].items())}.", "",
        "Attention kept: of what the window gives the candidates, mean over layers. Moved: budget "
        "that another head has than under equal shares. Needle: heads that keep the whole first "
        "answer, all layers.", "",
    ]  # fmt: skip
    for scenario, layers in spreads.items():
        lines += [f"## {scenario.capitalize()}", ""]
        fields = ("budget", "split", "accuracy", "minus equal", "attention kept", "moved", "needle")
        lines += [row(*fields), row("---", "---", *["---:"] * 5)]
        for entry in entries:
            if entry["scenario"] == scenario:
                lines.append(_line(entry))
        lines += [
            "", "Share of the candidates that holds 90% of a head's attention (median):", "",
            row("layer", *(f"head {h}" for h in range(len(layers[0])))),
            row("---", *["---:"] * len(layers[0])),
        ]  # fmt: skip
        lines += [
            row(str(i), *(f"{100 * share:.1f}%" for share in heads))
            for i, heads in enumerate(layers)
        ]
        lines.append("")
    output.with_suffix(".md").write_text("\n".join(lines))


def _line(entry: dict) -> str:
    difference = Estimate(**entry["minus_equal"])
    return row(
        entry["budget"],
        entry["split"],
        percent(Estimate(**entry["accuracy"])),
        "" if entry["split"] == EQUAL else points(difference),
        f"{100 * entry['attention_kept']:.1f}%",
        f"{100 * entry['pages_moved']:.1f}%",
        f"{100 * entry['heads_with_needle']:.1f}%",
    )
