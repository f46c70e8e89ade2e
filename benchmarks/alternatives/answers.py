"""Held-out questions: asked of a server, asked of kvpress, or cited from a published result."""

import argparse
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.alternatives.options import BLOCK, TASKS
from benchmarks.quality.cell import Cell
from benchmarks.quality.endpoint import Completion, Endpoint
from benchmarks.quality.intervals import estimate
from benchmarks.quality.journal import Journal
from benchmarks.quality.kvpress_baseline import KVZIP, PREFIX, answer_with_kvpress
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.measure import score
from benchmarks.quality.options import Options
from benchmarks.quality.prompt import AGNOSTIC, AWARE, Prompt
from benchmarks.quality.run import Run

WINDOW = 32
CITED = Path(__file__).parents[1] / "results" / "later_kvpress.md"

Answers = dict[str, dict[str, dict[str, float]]]
"""By task and scenario: ``mean``, ``low`` and ``high`` in [0, 1], and ``n`` samples."""


def prompts(args: argparse.Namespace, model: Path) -> list[Prompt]:
    """Make the same prompts as ``python -m benchmarks.quality`` with these options."""
    if not args.samples:
        return []
    options = Options(
        tasks=TASKS, samples=args.samples, length=args.length, seed=args.seed, kvpress=False
    )
    run = Run(options)
    run.prepare(LocalChat(model), BLOCK)
    return run.prompts


def ask(
    endpoint: Endpoint, prompts: Sequence[Prompt], evicts: bool, clients: int, journal: Journal
) -> tuple[Answers, int]:
    """Ask what the journal does not hold.

    A server that evicts is asked twice: with the end of the context as the eviction point, so that
    the question is not known, and with its own settings. The answer of another server does not
    depend on that, so it is asked once and the answer stands for both.

    Returns:
        The accuracy by task and scenario, and the number of requests that were sent.

    """
    scenarios = (AGNOSTIC, AWARE) if evicts else (AWARE,)

    def request(prompt: Prompt, scenario: str) -> tuple[tuple[int, ...], int, dict[str, str | int]]:
        at: dict[str, str | int] = {"kv_eviction_at": prompt.context}
        return prompt.ids, prompt.sample.max_tokens, at if scenario == AGNOSTIC else {}

    def one(prompt: Prompt) -> list[Completion]:
        found = []
        # One after the other: the second request finds the prompt in the prefix cache.
        for scenario in scenarios:
            wanted = request(prompt, scenario)
            answer = journal.find(*wanted)
            found.append(answer or journal.enter(*wanted, endpoint.complete(*wanted)))
        return found

    sent = sum(journal.find(*request(p, name)) is None for p in prompts for name in scenarios)
    with ThreadPoolExecutor(clients) as threads:
        rows = list(tqdm(threads.map(one, prompts), total=len(prompts), desc="questions"))
    columns = dict(zip(scenarios, zip(*rows, strict=True), strict=True))
    both = {name: columns.get(name, columns[AWARE]) for name in (AGNOSTIC, AWARE)}
    return summary(prompts, both), sent


def summary(prompts: Sequence[Prompt], columns: Mapping[str, Sequence[Completion]]) -> Answers:
    """Return accuracies with Wilson intervals of answers by scenario, in the prompts' order."""
    found: Answers = {}
    for scenario, column in columns.items():
        for task, scores in score(prompts, column).items():
            found.setdefault(task, {})[scenario] = asdict(estimate(scores))
    return found


def run_kvpress(
    args: argparse.Namespace, model: Path, prompts: Sequence[Prompt], budgets: Sequence[str]
) -> dict[str, Answers]:
    """Return the answers of KVzipPress by budget; the question is not known to it.

    Raises:
        RuntimeError: kvpress is not installed, or failed.

    """
    cells = [Cell(AGNOSTIC, PREFIX + KVZIP, budget) for budget in budgets]
    answers, _ = answer_with_kvpress(
        model, prompts, cells, window=WINDOW, block_size=BLOCK, max_tokens=None, dtype=args.dtype,
        folder=args.work, processes=2, check=0, resume=args.resume,
    )  # fmt: skip
    return {cell.budget: summary(prompts, {AGNOSTIC: answers[cell]}) for cell in cells}


def cite_kvpress(
    args: argparse.Namespace, model: Path, budgets: Sequence[str], path: Path = CITED
) -> dict[str, Answers]:
    """Return published answers of KVzipPress by budget.

    Only cells of the same model, length and seed are taken; all others are missing.

    Raises:
        ValueError: The file does not have the form of a report of ``benchmarks.quality``.

    """
    text = path.read_text()
    about = re.search(
        r"Model \S*?([^/\s]+); (\d+) samples of each task, --length (\d+), seed (\d+)", text
    )
    if about is None:
        raise ValueError(f"{path}: model, samples, length and seed are not named")
    name, samples, length, seed = about[1], *map(int, about.groups()[1:])
    if (name, length, seed) != (model.resolve().name, args.length, args.seed):
        return {budget: {} for budget in budgets}
    part = text.partition("\n## Question-agnostic\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines()]
    header = next((line for line in lines if line[:2] == ["task", "policy"]), None)
    if header is None:
        raise ValueError(f"{path}: no table of the scenario question-agnostic")
    found: dict[str, Answers] = {budget: {} for budget in budgets}
    task = ""
    for line in lines:
        # A task is named in the first of its rows only, and stripping removes an empty first cell.
        if len(line) == len(header):
            task, line = line[0], line[1:]
        if task not in TASKS or line[0] != PREFIX + KVZIP:
            continue
        for budget, cell in zip(header[2:], line[1:], strict=True):
            numbers = re.match(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", cell)
            if budget in found and numbers is not None:
                mean, low, high = (float(number) / 100 for number in numbers.groups())
                entry = dict(mean=mean, low=low, high=high, n=samples)
                found[budget].setdefault(task, {})[AGNOSTIC] = entry
    return found
