"""``make papers``: every policy of Ada-KV, NACL, H2O and SubGen, next to the papers' own numbers.

    python -m benchmarks.papers [--samples 100] [--models smollm2,gemma] [--budgets 10%,20%,50%]

Runs ``python -m benchmarks.quality`` once for each model, with the question known at the eviction
and not known, and prints a table for each paper. Models, tasks and lengths are not those of the
papers: the order of the policies can be compared, the numbers cannot. A run that was stopped goes
on.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.printed import FULL, PAPERS, Paper
from benchmarks.quality.ruler.tasks import TASKS
from vllm_kvevict.serving.cpu_dtype import fast_dtype

MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma 3 270M"}
SCENARIOS = {"question-aware": "known", "question-agnostic": "not known"}
POLICIES = tuple(dict.fromkeys(policy for paper in PAPERS for policy in paper.policies))
RESULT = Path("benchmarks/results/papers.json")


def command(model: str, options: argparse.Namespace, output: Path) -> list[str]:
    """Return the command that measures all policies on a model."""
    words = [
        sys.executable, "-m", "benchmarks.quality", "--policies", ",".join(POLICIES),
        "--tasks", options.tasks, "--budgets", options.budgets, "--samples", str(options.samples),
        "--length", str(options.length), "--seed", "3000", "--dtype", fast_dtype(),
        "--no-kvpress", "--resume", "--threshold", "0", "--work", str(options.work / model),
        "--output", str(output),
    ]  # fmt: skip
    if model == "gemma":
        from benchmarks.gemma3 import gemma

        words += ["--model", str(gemma())]
    return words


def score(cells: Sequence[dict[str, Any]], label: str, scenario: str, budget: str) -> str:
    """Return the average of a policy in percent; "-" where it was not measured."""
    for cell in cells:
        named = cell["label"], cell["scenario"], cell["budget"]
        if cell["task"] == "average" and named == (label, scenario, budget):
            return f"{100 * cell['mean']:.0f}" if cell["mean"] <= 1 else f"{cell['mean']:.0f}"
    return "-"


def full(cells: Sequence[dict[str, Any]]) -> str:
    """Return the average of the full cache in percent."""
    found = [cell for cell in cells if cell["task"] == "average" and not cell["budget"]]
    return score(found, found[0]["label"], found[0]["scenario"], found[0]["budget"])


def table(
    paper: Paper, measured: dict[str, Sequence[dict[str, Any]]], budgets: Sequence[str]
) -> Iterator[str]:
    """Return a paper's table in Markdown: its own numbers, then those of each model."""
    yield f"## {paper.name}\n"
    yield f"Printed: {paper.source}, {paper.model}. {paper.differs}\n"
    heads = [
        f"{MODELS[model]}, {said}, {budget}"
        for model in measured
        for said in SCENARIOS.values()
        for budget in budgets
    ]
    yield f"| policy | printed | {' | '.join(heads)} |"
    yield f"| --- | --- | {' | '.join('---:' for _ in heads)} |"
    for policy in (FULL, *paper.policies):
        printed = "; ".join(
            f"{one.score:g} ({one.of}, {one.kept})" for one in paper.printed if one.policy == policy
        )
        cells = [
            full(found) if policy == FULL else score(found, policy, scenario, budget)
            for found in measured.values()
            for scenario in SCENARIOS
            for budget in budgets
        ]
        name = policy if policy == FULL else f"`{policy}`"
        yield f"| {name} | {printed or '-'} | {' | '.join(cells)} |"
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers")
    add = parser.add_argument
    add("--samples", type=int, default=100, help="of each task (default: 100)")
    add("--length", type=int, default=1250, help="tokens of a prompt, about (default: 1250)")
    add("--budgets", default="10%,20%,50%", help="shares (default: 10%%,20%%,50%%)")
    add("--tasks", default="s-niah,later,unseen,defaults", help=f"of: {', '.join(TASKS)}")
    add("--models", default=",".join(MODELS), help=f"of: {', '.join(MODELS)}")
    add("--work", type=Path, default=Path(".cache/papers"), help="folder of logs and raw answers")
    add("--output", type=Path, default=RESULT, help=f"JSON; tables next to it (default: {RESULT})")
    options = parser.parse_args(arguments)
    models = options.models.split(",")
    if unknown := [model for model in models if model not in MODELS]:
        parser.error(f"--models: {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    measured, found = {}, {}
    for model in models:
        output = options.work / f"{model}.json"
        subprocess.run(command(model, options, output), check=True)
        found[model] = json.loads(output.read_text())
        measured[model] = found[model]["cells"]
    lines = [line for one in PAPERS for line in table(one, measured, options.budgets.split(","))]
    about = (
        f"Averages in percent over {options.tasks}, {options.samples} samples of each, prompts of "
        f"about {options.length} tokens, no profile."
    )
    text = "\n".join(["# The papers' policies", "", about, "", *lines])
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
