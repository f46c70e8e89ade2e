"""Several questions in turn about one context, as SCBench asks them: one eviction, five answers.

    python -m benchmarks.quality.turns --model FOLDER --layers auto --budgets 6.25%,12.5%,25%

A context holds five facts of the task `later`, each of another kind. They are asked for one after
another in one chat: the prompt of a turn holds the context, the questions before, and the model's
own answers to them. Each request names the end of the context as its eviction point, so that no
question is known at the eviction, and the first turn's store serves the others.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Lock

from pydantic import Field
from tqdm import tqdm

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Completion, Endpoint
from benchmarks.quality.journal import Journal
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.measure import Plan, together
from benchmarks.quality.options import OwnOptions
from benchmarks.quality.own_server import BLOCK_SIZE, Variant, profile_flags, server_key, start
from benchmarks.quality.prompt import AGNOSTIC, Prompt, make_prompt, message, text_tokens
from benchmarks.quality.report import origin
from benchmarks.quality.ruler import later
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.several import several
from benchmarks.quality.turns_report import markdown, summarize
from benchmarks.smollm2 import real_model

NAME = "turns"
EVICTIONS, REUSED = "evictions", "stores_reused"


class TurnsOptions(OwnOptions):
    """Options of ``python -m benchmarks.quality.turns``."""

    PROG = "python -m benchmarks.quality.turns"
    DESCRIPTION = "Several questions in turn about one context that was evicted once."

    budgets: tuple[str, ...] = Field(
        ("6.25%", "12.5%", "25%"), description="shares of the context, or tokens; comma-separated"
    )
    samples: int = Field(100, ge=1, description="contexts")
    length: int = Field(1250, ge=50, description="tokens of the first turn's prompt, about")
    turns: int = Field(
        5, ge=2, le=len(later.KINDS), description="questions about each context, and its facts"
    )
    concurrency: int = Field(4, ge=1, description="contexts that are asked about at once")
    layers: str | None = Field(
        "auto", description="profile of the model: a file for --kv-eviction-profile, auto, or none"
    )
    output: Path = Field(Path("benchmarks/results/turns.json"), description="result file")


@dataclass(frozen=True)
class Turn:
    """A question of a dialogue and its answer."""

    prompt: Prompt
    answer: Completion

    @property
    def score(self) -> float:
        return self.prompt.sample.score(self.answer.text)


Ask = Callable[[Prompt, Cell], Completion]
Row = Mapping[Cell, Sequence[Turn]]
"""The turns about one context, by cell."""


def contexts(options: TurnsOptions, chat: LocalChat) -> list[list[RulerSample]]:
    """For each context one sample a turn, in the order in which they are asked.

    Raises:
        ValueError: ``--length`` is too short for so many facts.

    """
    tokens = text_tokens(options.length, later.KINDS[0][1], chat.tokenize)
    found = []
    for index in range(options.samples):
        rng = random.Random(f"{NAME}/{options.seed * 1_000_000 + index}")
        samples = several(rng, NAME, tokens, options.turns, chat.encode)
        # Facts are not asked for in the order of the text.
        rng.shuffle(samples)
        found.append(samples)
    return found


def turn_ids(
    chat: LocalChat, samples: Sequence[RulerSample], answers: Sequence[str]
) -> tuple[int, ...]:
    """Token ids of the turn after ``answers``.

    An answer enters the chat after the beginning that its prompt gave it, and up to its first line
    break: a base model would go on with questions of its own.
    """
    messages = message(samples[0])
    for sample, answer, following in zip(samples, answers, samples[1:], strict=False):
        said = sample.prefix + answer.partition("\n")[0].rstrip()
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": following.question},
        ]
    return (*chat.tokenize(messages), *chat.encode(samples[len(answers)].prefix))


def converse(chat: LocalChat, samples: Sequence[RulerSample], cell: Cell, ask: Ask) -> list[Turn]:
    """Ask all questions about a context in turn.

    Raises:
        ValueError: The chat template changes the context in a later turn.

    """
    first = make_prompt(samples[0], chat.tokenize, chat.encode)
    turns: list[Turn] = []
    for sample in samples:
        ids = turn_ids(chat, samples, [turn.answer.text for turn in turns])
        if ids[: first.context] != first.ids[: first.context]:
            raise ValueError(
                f"the chat template changes the context in turn {len(turns) + 1}, so that no turn "
                "can reuse the store of another"
            )
        prompt = Prompt(sample, ids, first.context)
        turns.append(Turn(prompt, ask(prompt, cell)))
    return turns


class Dialogues:
    """Asks a server about contexts and counts what the server must have counted.

    Args:
        chat: Template and tokenizer of the model.
        plan: Policies and budgets; the scenario is the question that is not known.
        journal: Answers of earlier runs.
        endpoint: The server.

    """

    def __init__(self, chat: LocalChat, plan: Plan, journal: Journal, endpoint: Endpoint) -> None:
        self._chat, self._plan, self._journal, self._endpoint = chat, plan, journal, endpoint
        self._lock = Lock()
        self.expected: Counter[str] = Counter({EVICTIONS: 0, REUSED: 0})
        """Evictions and reused stores of the requests that were not in the journal."""

    def about(self, samples: Sequence[RulerSample], bar: tqdm) -> Row:
        """All cells about one context, the full cache first."""
        return {cell: self._under(cell, samples, bar) for cell in (FULL_CELL, *self._plan.cells())}

    def _under(self, cell: Cell, samples: Sequence[RulerSample], bar: tqdm) -> list[Turn]:
        asked = 0

        def ask(prompt: Prompt, cell: Cell) -> Completion:
            nonlocal asked
            wanted = prompt.ids, self._plan.limit(prompt), self._plan.xargs(cell, prompt)
            answer = self._journal.find(*wanted)
            if answer is None:
                asked += 1
                answer = self._journal.enter(*wanted, self._endpoint.complete(*wanted))
            bar.update()
            return answer

        turns = converse(self._chat, samples, cell, ask)
        plan, context = self._plan, turns[0].prompt.context
        evicts = cell != FULL_CELL and plan.kept(cell.budget, context).evicts
        if asked and evicts:
            with self._lock:
                self.expected.update({EVICTIONS: 1, REUSED: asked - 1})
        return turns

    def all(self, contexts: Sequence[Sequence[RulerSample]], concurrency: int) -> list[Row]:
        """Ask about ``concurrency`` contexts at a time."""
        cells = 1 + len(self._plan.cells())
        with tqdm(total=sum(map(len, contexts)) * cells, unit="req") as bar:
            return together(self.about, contexts, concurrency, bar)


def compare(expected: Mapping[str, int], counted: Mapping[str, int]) -> list[str]:
    """Compare the server's totals with what the requests must have caused; returns notes.

    Raises:
        RuntimeError: A context was evicted more or less than once, or a turn did not reuse its
            store.

    """
    asked = expected[EVICTIONS] + expected[REUSED]
    if all(counted[key] == expected[key] for key in (EVICTIONS, REUSED)):
        return []
    if counted[REUSED] == 0 and counted[EVICTIONS] == asked:
        return [
            "No turn reused a store: this server shares none, for example because some of the "
            "model's layers are recurrent. Each turn evicted its context anew."
        ]
    raise RuntimeError(
        f"{expected[EVICTIONS]} evictions and {expected[REUSED]} reused stores were expected, and "
        f"the server counts {counted[EVICTIONS]} and {counted[REUSED]}"
    )


def write(
    options: TurnsOptions, folder: Path, plan: Plan, rows: Sequence[Row],
    evictions: Mapping[str, Mapping[str, int]], notes: Sequence[str],
) -> str:  # fmt: skip
    """The result as JSON and Markdown, all answers in ``--work``; the Markdown is returned."""
    points = [row[FULL_CELL][0].prompt.context for row in rows]
    result = {
        **origin(options, folder),
        "evictions": {name: dict(found) for name, found in evictions.items()},
        "notes": list(notes),
        "context_tokens": fmean(points),
        "kept_tokens": {
            budget: fmean(plan.kept(budget, p).tokens for p in points) for budget in plan.budgets
        },
        "cells": summarize([{c: [t.score for t in turns] for c, turns in r.items()} for r in rows]),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    options.output.with_suffix(".md").write_text(text)
    answers = [
        {
            "context": index, "label": cell.label, "budget": cell.budget, "turn": number,
            "question": turn.prompt.sample.question, "expected": turn.prompt.sample.answers,
            "prompt_tokens": len(turn.prompt.ids), "answer": turn.answer.text,
        }
        for index, row in enumerate(rows)
        for cell, turns in row.items()
        for number, turn in enumerate(turns, 1)
    ]  # fmt: skip
    (options.work / f"answers-{NAME}.json").write_text(json.dumps(answers, indent=1) + "\n")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    options = TurnsOptions.parse(arguments)
    folder = Path(options.model or real_model())
    chat = LocalChat(folder)
    try:
        asked = contexts(options, chat)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    labels = {policy: policy for policy in options.policies}
    plan = Plan(
        labels, options.budgets, (AGNOSTIC,), None, options.window,
        options.block_size or BLOCK_SIZE, options.store_dtype,
    )  # fmt: skip
    variant = Variant(NAME, profile_flags(options), labels)
    journal = Journal(
        options.work / f"answers-{NAME}.jsonl",
        options.resume,
        server_key(options, folder, profile_flags(options)),
    )
    with start(options, variant, folder) as server:
        dialogues = Dialogues(chat, plan, journal, Endpoint(server.url))
        rows = dialogues.all(asked, options.concurrency)
    counted, expected = server.evictions(), dict(dialogues.expected)
    try:
        notes = compare(expected, counted)
    except RuntimeError as error:
        # The answers are kept; the result says that they are not what the cells promise.
        write(options, folder, plan, rows, dict(expected=expected, counted=counted), [str(error)])
        raise SystemExit(str(error)) from None
    print(write(options, folder, plan, rows, dict(expected=expected, counted=counted), notes))


if __name__ == "__main__":
    main()
