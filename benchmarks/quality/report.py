"""What a run leaves behind: JSON, Markdown, plots."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.provenance import add_model, provenance, sentence, weights_sha256
from benchmarks.quality.options import OwnOptions
from benchmarks.quality.plots import plot
from benchmarks.quality.results import Results
from benchmarks.quality.run import Run
from benchmarks.quality.table import markdown


def write(gathered: Run, results: Results) -> None:
    """JSON, Markdown and plots beside one another."""
    options, output = gathered.options, gathered.options.output
    own = not options.base_url
    if own:
        # All answers may be of an earlier run, so that no server started.
        add_model(gathered.folder)
    source = provenance()
    source["command"] = source["command"].replace(".__main__", "")
    source["versions"] |= {f"kvpress environment: {k}": v for k, v in gathered.versions.items()}
    kept_table = gathered.kept()
    data = {
        **source,
        "model": os.path.relpath(gathered.folder)
        if own
        else f"{options.model or 'served'} at {options.base_url}",
        "weights_sha256": weights_sha256(gathered.folder) if own else None,
        "options": options.model_dump(mode="json"),
        "block_size": gathered.block_size,
        "evictions": gathered.evictions,
        "notes": gathered.notes,
        "full_cache_answers_equal_to_transformers": gathered.full_agreement(),
        "kept": [
            {"scenario": scenario, "budget": budget, **found}
            for (scenario, budget), found in kept_table.items()
        ],
        **results.as_json(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(data, indent=1) + "\n")
    tables = markdown(results, kept_table)
    output.with_suffix(".md").write_text(_head(data) + "\n" + tables)
    figures = plot(results, output)
    print(tables)
    print("\n".join([*_evictions(gathered.evictions), *gathered.notes]))
    print(f"wrote {output}, {output.with_suffix('.md')}, {', '.join(map(str, figures))}")


def origin(options: OwnOptions, folder: Path) -> dict[str, Any]:
    """Return how a result was made: machine, versions, commit, model, hash of weights, options."""
    add_model(folder)
    return {
        **provenance(),
        "model": os.path.relpath(folder),
        "weights_sha256": weights_sha256(folder),
        "options": options.model_dump(mode="json"),
    }


def _evictions(evictions: dict[str, dict]) -> list[str]:
    """A sentence for each server."""
    lines = []
    for name, found in evictions.items():
        expected, counted = found["expected"], found["counted"]
        tokens = expected.get("tokens_evicted")
        must = f"{expected['evictions']} evictions"
        if tokens is not None:
            must += f" of {tokens} tokens per KV head"
        did = (
            "not published"
            if counted is None
            else ", ".join(f"{key} {value}" for key, value in counted.items())
        )
        lines.append(f"Server {name}: {must} must happen; its counters: {did}.")
    return lines


def _head(data: dict) -> str:
    options = data["options"]
    about = (
        f"model {data['model']}, {options['samples']} samples of each task, --length "
        f"{options['length']}, seed {options['seed']}, blocks of {data['block_size']} tokens"
    )
    lines = [
        "# Quality under eviction",
        "",
        sentence(data, about),
        "",
        "Accuracy in percent with 95% intervals; behind it the samples that score less (-) and "
        "more (+) than with the full cache, and McNemar's exact p (of the sign test where scores "
        "lie between 0 and 1). What the columns and rows mean: docs/quality.md.",
        "",
        *(f"- {line}" for line in [*_evictions(data["evictions"]), *data["notes"]]),
    ]
    if data["full_cache_answers_equal_to_transformers"] is not None:
        share = data["full_cache_answers_equal_to_transformers"]
        lines += ["", f"With the full cache, transformers gives the same answer to {share:.1%}."]
    return "\n".join([*lines, ""])
