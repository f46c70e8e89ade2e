"""One run of the benchmark, from samples to files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.provenance import provenance
from benchmarks.quality.budget import kept
from benchmarks.quality.cell import FULL_CELL, Cell, Scores
from benchmarks.quality.endpoint import Completion, Endpoint
from benchmarks.quality.kvpress_baseline import (
    TRANSFORMERS_FULL,
    answer_with_kvpress,
    baseline_cells,
)
from benchmarks.quality.measure import Plan, measure, render, score
from benchmarks.quality.options import SHIPPED, Options
from benchmarks.quality.own_server import Variant, start, variants
from benchmarks.quality.plots import plot
from benchmarks.quality.prompt import Prompt
from benchmarks.quality.results import Results, summarize
from benchmarks.quality.table import markdown
from benchmarks.quality.tasks import make

EVICTIONS = "vllm_kvevict:evictions_total"


@dataclass
class Run:
    """What a run gathers: prompts, answers by cell, eviction counters by server."""

    options: Options
    prompts: list[Prompt] = field(default_factory=list)
    answers: dict[Cell, list[Completion]] = field(default_factory=dict)
    evictions: dict[str, dict] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    block_size: int = 0

    def ask(self, endpoint: Endpoint, variant: Variant) -> int:
        """Measure a variant; returns the evictions that its requests must have caused.

        Raises:
            RuntimeError: No budget evicts anything, or full-cache answers changed.

        """
        options = self.options
        if not self.prompts:
            samples = [
                make(task, options.words, options.seed * 1_000_000 + index)
                for task in options.tasks
                for index in range(options.samples)
            ]
            self.prompts = render(endpoint, samples, options.concurrency)
            self.block_size = options.block_size or endpoint.block_size()
        endpoint.check_eviction_per_request(self.prompts[0].ids[:64])
        plan = Plan(
            variant.labels, options.budgets, options.scenarios, options.max_tokens,
            options.window, self.block_size,
        )  # fmt: skip
        measured = measure(endpoint, plan, self.prompts, options.concurrency)
        if not measured.expected_evictions:
            raise RuntimeError(
                "every budget covers its whole prompt, so nothing would be evicted: give more "
                "--words or smaller --budgets"
            )
        full = measured.answers.pop(FULL_CELL)
        if self.answers.setdefault(FULL_CELL, full) != full:
            changed = sum(a != b for a, b in zip(self.answers[FULL_CELL], full, strict=True))
            self.evictions.setdefault("notes", {})[
                f"full-cache answers other under {variant.name}"
            ] = changed
        self.answers |= measured.answers
        return measured.expected_evictions

    def count(self, variant: Variant, expected: int, counted: dict[str, int] | None) -> None:
        """Enter a server's totals.

        Raises:
            RuntimeError: It evicted less often than its requests must have caused.

        """
        self.evictions[variant.name] = {"expected": expected, "counted": counted}
        if counted is not None and counted["evictions"] < expected:
            raise RuntimeError(
                f"{expected} requests had to evict, the server counts {counted}: the cells are "
                "not what they say"
            )

    def kept(self) -> dict[tuple[str, str], dict]:
        """By scenario and budget: mean tokens kept, mean eviction point, and share not evicted."""
        table = {}
        for scenario in self.options.scenarios:
            points = [prompt.point(scenario) for prompt in self.prompts]
            for budget in self.options.budgets:
                found = [kept(budget, p, self.options.window, self.block_size) for p in points]
                table[scenario, budget] = {
                    "tokens": fmean(one.tokens for one in found),
                    "point": fmean(points),
                    "covered": fmean(not one.evicts for one in found),
                }
        return table

    def scores(self) -> Scores:
        return {cell: score(self.prompts, row) for cell, row in self.answers.items()}

    def full_agreement(self) -> float | None:
        """Share of prompts that transformers answers as the server does, with the full cache."""
        theirs = self.answers.get(TRANSFORMERS_FULL)
        if theirs is None:
            return None
        pairs = zip(self.answers[FULL_CELL], theirs, strict=True)
        return fmean(ours.text.split() == other.text.split() for ours, other in pairs)


def run(options: Options) -> int:
    """Measure, write JSON, Markdown and plots, print the table. Returns the exit status."""
    gathered = Run(options)
    if options.base_url:
        model, weights = _remote(gathered)
    else:
        model = Path(options.model or SHIPPED)
        weights = _sha256(model)
        _own(gathered, model)
        if options.kvpress:
            _kvpress(gathered, model)
    write_answers(gathered, options.work / "answers.json")
    results = summarize(gathered.scores(), options.threshold)
    write(gathered, results, str(model), weights)
    return 0


def _own(gathered: Run, model: Path) -> None:
    for variant in variants(gathered.options):
        with start(gathered.options, variant, model) as server:
            expected = gathered.ask(Endpoint(server.url), variant)
            status = server.stop()
        if status:
            print(f"the server ended with status {status}, see {server.log}")
        gathered.count(variant, expected, server.evictions())


def _remote(gathered: Run) -> tuple[str, None]:
    endpoint = Endpoint(gathered.options.base_url or "", gathered.options.model)
    variant = variants(gathered.options)[0]
    before = endpoint.metrics(EVICTIONS)
    expected = gathered.ask(endpoint, variant)
    after = endpoint.metrics(EVICTIONS)
    counted = None
    if after is not None:
        counted = {"evictions": int(sum(after.values()) - sum((before or {}).values()))}
    gathered.count(variant, expected, counted)
    return endpoint.model, None


def _kvpress(gathered: Run, model: Path) -> None:
    options = gathered.options
    cells = baseline_cells(options.policies, options.budgets, options.scenarios)
    answers, gathered.versions = answer_with_kvpress(
        model, gathered.prompts, cells, window=options.window, block_size=gathered.block_size,
        max_tokens=options.max_tokens, folder=options.work, threads=options.threads,
        check=options.check,
    )  # fmt: skip
    gathered.answers |= answers


def write_answers(gathered: Run, path: Path) -> None:
    """Every answer in plain text, for whoever wants to read them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "task": prompt.sample.task,
            "question": prompt.sample.question,
            "expected": prompt.sample.answers,
            "prompt_tokens": len(prompt.ids),
            "context_tokens": prompt.context,
            "answers": {
                " | ".join(filter(None, (cell.scenario, cell.label, cell.budget))): row[index].text
                for cell, row in gathered.answers.items()
            },
        }
        for index, prompt in enumerate(gathered.prompts)
    ]
    path.write_text(json.dumps(rows) + "\n")


def write(gathered: Run, results: Results, model: str, weights: str | None) -> None:
    """JSON, Markdown and plots beside one another."""
    options, output = gathered.options, gathered.options.output
    source = provenance()
    source["versions"] |= {f"kvpress environment: {k}": v for k, v in gathered.versions.items()}
    kept_table = gathered.kept()
    data = {
        **source,
        "model": model,
        "weights_sha256": weights,
        "options": options.model_dump(mode="json"),
        "block_size": gathered.block_size,
        "evictions": gathered.evictions,
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
    print("\n".join(_evictions(gathered.evictions)))
    print(f"wrote {output}, {output.with_suffix('.md')}, {', '.join(map(str, figures))}")


def _evictions(evictions: dict[str, dict]) -> list[str]:
    return [f"evictions, {name}: {found}" for name, found in evictions.items()]


def _head(data: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    options = data["options"]
    lines = [
        "# Quality under eviction",
        "",
        f"`{data['command']}`, {data['date']}, commit {data['commit']}. Model {data['model']}; "
        f"{options['samples']} samples of each task, {options['words']} words, seed "
        f"{options['seed']}, blocks of {data['block_size']} tokens. {data['machine']}. {versions}.",
        "",
        "Accuracy in percent with 95% intervals. What the columns and rows mean: docs/quality.md.",
        "",
        *_evictions(data["evictions"]),
    ]
    if data["full_cache_answers_equal_to_transformers"] is not None:
        share = data["full_cache_answers_equal_to_transformers"]
        lines += ["", f"With the full cache, transformers gives the same answer to {share:.1%}."]
    return "\n".join([*lines, ""])


def _sha256(model: Path) -> str | None:
    found: Sequence[Path] = sorted(model.glob("*.safetensors"))
    if not found:
        return None
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.read_bytes())
    return digest.hexdigest()
