"""One run of the benchmark, from samples to answers."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from threading import Lock

from benchmarks.quality.budget import kept
from benchmarks.quality.cell import FULL_CELL, Cell, Scores
from benchmarks.quality.endpoint import Completion, Endpoint
from benchmarks.quality.journal import Journal
from benchmarks.quality.kvpress_baseline import (
    TRANSFORMERS_FULL,
    answer_with_kvpress,
    baseline_cells,
)
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.measure import Plan, measure, render, samples_of, score
from benchmarks.quality.options import Options
from benchmarks.quality.own_server import BLOCK_SIZE, Variant, server_key, start, variants
from benchmarks.quality.prompt import Prompt
from benchmarks.quality.raw_answers import write_answers
from benchmarks.smollm2 import real_model

EVICTIONS = "vllm_kvevict:evictions_total"


@dataclass
class Run:
    """What a run gathers: prompts, answers by cell, eviction counters by server."""

    options: Options
    prompts: list[Prompt] = field(default_factory=list)
    answers: dict[Cell, list[Completion]] = field(default_factory=dict)
    evictions: dict[str, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    journals: dict[str, Journal] = field(default_factory=dict)
    block_size: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def folder(self) -> Path:
        """The model of an own server."""
        return Path(self.options.model or real_model())

    def prepare(self, chat: Endpoint | LocalChat, block_size: int) -> None:
        """Make the prompts of all samples under the model's chat template."""
        options = self.options
        seeds = [options.seed * 1_000_000 + index for index in range(options.samples)]
        samples = samples_of(chat, options.tasks, options.length, seeds)
        self.prompts = render(chat, samples, options.concurrency)
        self.block_size = block_size

    def plan(self, variant: Variant) -> Plan:
        options = self.options
        return Plan(
            variant.labels, options.budgets, options.scenarios, options.max_tokens,
            options.window, self.block_size, options.store_dtype,
        )  # fmt: skip

    def open_journal(self, variant: Variant, model: str) -> bool:
        """Read what earlier runs answered; whether anything is left to ask of ``variant``."""
        path = self.options.work / f"answers-{variant.name}.jsonl"
        journal = Journal(
            path, self.options.resume, server_key(self.options, Path(model), variant.flags)
        )
        self.journals[variant.name] = journal
        plan = self.plan(variant)
        if not self.evicts(plan):
            raise RuntimeError(
                "every budget covers its whole prompt, so nothing would be evicted: give more "
                "--length or smaller --budgets"
            )
        asked = sum(len(plan.missing(prompt, journal)) for prompt in self.prompts)
        known = (1 + len(plan.cells())) * len(self.prompts) - asked
        if known:
            self.notes.append(
                f"{known} answers of server {variant.name} are from earlier parts of this run"
            )
        return asked > 0

    def ask(self, endpoint: Endpoint | None, variant: Variant) -> dict[str, int]:
        """Measure a variant; returns what its server must count.

        Args:
            endpoint: None where the journal holds every answer.
            variant: What the server is; its journal is open.

        Raises:
            RuntimeError: The server takes no eviction settings.

        """
        options, plan, journal = self.options, self.plan(variant), self.journals[variant.name]
        if endpoint is not None:
            endpoint.check_eviction_per_request(self.prompts[0].ids[:64])
        expected = plan.expected(self.prompts, journal)
        if variant.has_groups:
            # Groups of layers round by themselves.
            del expected["tokens_evicted"]
        answers = measure(endpoint, plan, self.prompts, options.concurrency, journal)
        with self._lock:
            pairs = zip(self.answers.get(FULL_CELL, ()), answers[FULL_CELL], strict=False)
            changed = sum(first != second for first, second in pairs)
            if changed:
                self.notes.append(f"{changed} full-cache answers differ under {variant.name}")
            self.enter(answers | self.answers)
        return expected

    def evicts(self, plan: Plan) -> bool:
        """Whether any request of a plan evicts."""
        return any(
            plan.kept(cell.budget, prompt.point(cell.scenario)).evicts
            for cell in plan.cells()
            for prompt in self.prompts
        )

    def enter(self, answers: dict[Cell, list[Completion]]) -> None:
        """Keep answers, also in a file: a later failure must not lose them."""
        self.answers |= answers
        write_answers(self.prompts, self.answers, self.options.work / "answers.json")

    def count(
        self, variant: Variant, expected: dict[str, int], counted: dict[str, int] | None
    ) -> None:
        """Enter a server's totals and compare them with what its requests must have caused.

        A preempted request evicts again, so more is possible and is noted.

        Raises:
            RuntimeError: The server evicted less often, or other numbers of tokens.

        """
        self.evictions[variant.name] = {"expected": expected, "counted": counted}
        if counted is None:
            self.notes.append("the server publishes no eviction counters: nothing was compared")
            return
        compared = {key: counted[key] for key in expected if key in counted}
        if counted["evictions"] > expected["evictions"]:
            self.notes.append(f"server {variant.name}: preempted requests evicted more than once")
        elif compared != {key: expected[key] for key in compared}:
            raise RuntimeError(
                f"the requests must have caused {expected}, the server counts {compared}: the "
                "cells are not what they say"
            )

    def kept(self) -> dict[tuple[str, str], dict]:
        """By scenario and budget: mean tokens kept, mean eviction point, and share not evicted."""
        table, options = {}, self.options
        for scenario in options.scenarios:
            points = [prompt.point(scenario) for prompt in self.prompts]
            for budget in options.budgets:
                found = [
                    kept(budget, p, options.window, self.block_size, options.store_dtype)
                    for p in points
                ]
                table[scenario, budget] = {
                    "tokens": fmean(one.tokens for one in found),
                    "point": fmean(points),
                    "covered": fmean(not one.evicts for one in found),
                }
        return table

    def scores(self) -> Scores:
        return {cell: score(self.prompts[: len(row)], row) for cell, row in self.answers.items()}

    def full_agreement(self) -> float | None:
        """Share of prompts that transformers answers as the server does, with the full cache."""
        theirs = self.answers.get(TRANSFORMERS_FULL)
        if theirs is None:
            return None
        pairs = zip(self.answers[FULL_CELL], theirs, strict=False)
        return fmean(ours.ids == other.ids for ours, other in pairs)


def gather(options: Options) -> Run:
    """Ask everything of an own server or of ``options.base_url``, and of kvpress."""
    gathered = Run(options)
    if options.base_url:
        _remote(gathered)
    else:
        _own(gathered, gathered.folder)
        if options.kvpress:
            _kvpress(gathered, gathered.folder)
    return gathered


def _own(gathered: Run, model: Path) -> None:
    gathered.prepare(LocalChat(model), gathered.options.block_size or BLOCK_SIZE)
    chosen = variants(gathered.options)
    wanted = [variant for variant in chosen if gathered.open_journal(variant, str(model))]
    for variant in chosen:
        if variant not in wanted:
            gathered.ask(None, variant)
    if not wanted:
        return
    with ExitStack() as running, ThreadPoolExecutor(len(wanted)) as threads:
        servers = [running.enter_context(start(gathered.options, v, model)) for v in wanted]
        endpoints = [Endpoint(server.url) for server in servers]
        expected = list(threads.map(gathered.ask, endpoints, wanted))
        for server in servers:
            server.stop()
    for variant, server, must in zip(wanted, servers, expected, strict=True):
        gathered.count(variant, must, server.evictions())


def _remote(gathered: Run) -> None:
    options = gathered.options
    endpoint = Endpoint(options.base_url or "", options.model)
    variant = variants(options)[0]
    gathered.prepare(endpoint, options.block_size or endpoint.block_size())
    gathered.open_journal(variant, endpoint.model)
    before = endpoint.metrics(EVICTIONS)
    expected = gathered.ask(endpoint, variant)
    after = endpoint.metrics(EVICTIONS)
    counted = None
    if after is not None:
        counted = {"evictions": int(sum(after.values()) - sum((before or {}).values()))}
    gathered.count(variant, expected, counted)


def _kvpress(gathered: Run, model: Path) -> None:
    options = gathered.options
    cells = baseline_cells(options.presses, options.budgets, options.scenarios)
    # A seed has one prompt of each task.
    count = (options.kvpress_samples or options.samples) * len(options.tasks)
    answers, gathered.versions = answer_with_kvpress(
        model, gathered.prompts[:count], cells, window=options.window,
        block_size=gathered.block_size, max_tokens=options.max_tokens, dtype=options.dtype,
        folder=options.work, processes=options.threads, check=options.check, resume=options.resume,
    )  # fmt: skip
    gathered.enter(answers)
