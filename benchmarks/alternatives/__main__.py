"""``python -m benchmarks.alternatives``: other ways to save KV memory, at equal memory.

    python -m benchmarks.alternatives [--model FOLDER] [--layers PROFILE] [--samples N]
        [--dtype TYPE] [--output FILE.json] [--resume] [--quick]

Measures stock vLLM, an FP8 KV cache, eviction with stores of each type, eviction over an FP8 cache,
``streaming-llm`` and vLLM's KV offload, one server after the other with the same KV-cache memory:
the load of ``vllm bench serve``, all requests at once, and held-out questions. kvpress, which does
not serve, has answers only. Needs an idle machine. A row that was measured is kept in ``--work``;
``--resume`` continues after it.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.alternatives import answers
from benchmarks.alternatives.measure import measure_way, server_args
from benchmarks.alternatives.options import CITE, NONE, RESULT, RUN, parse
from benchmarks.alternatives.report import markdown
from benchmarks.alternatives.ways import AUTO, EIGHTH, KVPRESS, STOCK, WAYS
from benchmarks.provenance import UNKNOWN, commit, provenance, used
from benchmarks.quality.journal import Journal
from benchmarks.quality.prompt import Prompt
from benchmarks.smollm2 import real_model

Row = dict[str, Any]


class Rows:
    """Rows that were measured, as JSON Lines, by everything that they depend on.

    Args:
        path: Appended to; created if it is missing.
        resume: True to keep the rows that it holds.

    """

    def __init__(self, path: Path, resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._found = path, dict[str, Row]()
        if resume and path.exists():
            # A process that was killed can leave half a line, which has no end.
            for line in path.read_text().rpartition("\n")[0].split("\n"):
                if line:
                    entry = json.loads(line)
                    self._found[entry["key"]] = entry["row"]
        text = "".join(json.dumps({"key": k, "row": r}) + "\n" for k, r in self._found.items())
        path.write_text(text)

    def find(self, key: str) -> Row | None:
        """Return the row of a key, or None."""
        return self._found.get(key)

    def enter(self, key: str, row: Row) -> Row:
        """Keep a row, also in the file, and return it."""
        self._found[key] = row
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "row": row}) + "\n")
        return row


def key_of(args: argparse.Namespace, model: Path, flags: Sequence[str]) -> str:
    """Return a name of everything that a row depends on, the commit included."""
    names = ("samples", "length", "prompt", "output_tokens", "requests", "clients", "seed")
    asked = [commit(), str(model.resolve()), list(flags), *(getattr(args, n) for n in names)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def run(args: argparse.Namespace, model: Path, prompts: Sequence[Prompt]) -> list[Row]:
    """Measure every way that was asked for, and enter kvpress.

    Raises:
        RuntimeError: A request failed, or a server did not evict what it should have.

    """
    chosen = [way for way in WAYS if way in (STOCK, AUTO) or way.key in args.rows]
    kept, rows = Rows(args.work / "rows.jsonl", args.resume), list[Row]()
    auto_budget: str | None = None
    with tqdm(total=len(chosen)) as bar:
        for way in chosen:
            bar.set_description(way.key)
            key = key_of(args, model, server_args(way, args, model, auto_budget))
            row = kept.find(key)
            if row is None:
                journal = Journal(args.work / f"{way.key}-{key}.jsonl", args.resume, model.name)
                measured = measure_way(way, args, model, prompts, journal, auto_budget)
                row = kept.enter(key, {"key": way.key, "title": way.title, **measured})
            if way == AUTO:
                auto_budget = row["budget"]
            rows.append(row)
            bar.update()
    assert auto_budget is not None, "auto is always measured"
    budgets = list(dict.fromkeys([auto_budget, EIGHTH]))
    return [*rows, *_kvpress(args, model, prompts, budgets)]


def _kvpress(
    args: argparse.Namespace, model: Path, prompts: Sequence[Prompt], budgets: list[str]
) -> list[Row]:
    if KVPRESS not in args.rows or args.kvpress == NONE or not prompts:
        return []
    found = (
        answers.run_kvpress(args, model, prompts, budgets)
        if args.kvpress == RUN
        else answers.cite_kvpress(args, model, budgets)
    )
    return [
        {"key": KVPRESS, "title": f"kvpress `KVzipPress`, {budget}", "budget": budget,
         "answers": found[budget],
         "cited": answers.CITED.name if args.kvpress == CITE and found[budget] else None}
        for budget in budgets
    ]  # fmt: skip


def main() -> None:
    args = parse()
    model = args.model or real_model()
    origin = provenance()
    if args.output == RESULT and (
        origin["commit"] == UNKNOWN or origin["commit"].endswith("-dirty")
    ):
        print(f"Commit {origin['commit']}: this result cannot be published.", file=sys.stderr)
    prompts = answers.prompts(args, model)
    rows = run(args, model, prompts)
    options = {name: str(value) for name, value in vars(args).items()}
    result = origin | used() | {"model": str(model), "options": options, "rows": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    args.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
