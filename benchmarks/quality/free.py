"""A long answer that nothing forces, against the full cache's answer.

    python -m benchmarks.quality.free --model FOLDER --layers auto --budgets 12.5%,25%

A context holds twelve facts about people, and the prompt asks for all of them. The server writes
1,024 tokens greedily and past the end of its answer: with the full cache, with one eviction after
prefill, and with evictions in decode as well. The same server then computes each answer as a prompt
with the full cache. Reported are the negative log-likelihood of each answer under the full cache,
the share of the facts' values that it contains, and the token at which it leaves the full cache's
answer.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock

from pydantic import Field
from tqdm import tqdm

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Endpoint
from benchmarks.quality.free_report import FIRST_TOKENS, Answer, markdown, summarize
from benchmarks.quality.journal import Journal
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.measure import Plan, together
from benchmarks.quality.options import OwnOptions
from benchmarks.quality.own_server import BLOCK_SIZE, Variant, profile_flags, server_key, start
from benchmarks.quality.prompt import AWARE, Prompt, make_prompt, text_tokens
from benchmarks.quality.report import origin
from benchmarks.quality.ruler import later
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.several import several, share_said
from benchmarks.smollm2 import real_model
from vllm_kvevict.config.config import EvictionConfig

NAME = "free"
QUESTION = (
    "Write down everything that the text says about the people in it. Write a list with one "
    "sentence for each person."
)
DECODE = ", in decode"
"""Ends the label of a policy that evicts in decode as well."""
WAIT = 64
"""Steps that a decode eviction may wait for its turn among many."""
SCORING_TOKENS = "512"
"""Most tokens of a step: logits of so many tokens are in memory at once while a prompt is scored.
"""
FULL_XARGS: dict[str, str | int] = {"kv_eviction": "none"}
PREFILL, IN_DECODE = "evictions_prefill", "evictions_decode"


class FreeOptions(OwnOptions):
    """Options of ``python -m benchmarks.quality.free``."""

    PROG = "python -m benchmarks.quality.free"
    DESCRIPTION = "Long free answers under eviction, against the full cache's answers."

    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%"), description="shares of the tokens so far, or tokens; comma-separated"
    )
    samples: int = Field(20, ge=1, description="contexts")
    length: int = Field(1250, ge=50, description="tokens of the prompt, about")
    facts: int = Field(12, ge=1, le=len(later.KINDS), description="facts in each context")
    tokens: int = Field(1024, ge=FIRST_TOKENS, description="tokens of an answer")
    beginning: bool = Field(
        True, description="the answer begins with the first fact, up to its value"
    )
    concurrency: int = Field(4, ge=1, description="contexts that are asked about at once")
    layers: str | None = Field(
        "auto", description="profile of the model: a file for --kv-eviction-profile, auto, or none"
    )
    output: Path = Field(Path("benchmarks/results/free.json"), description="result file")


def prompts(options: FreeOptions, chat: LocalChat) -> list[Prompt]:
    """One prompt a context.

    With ``--beginning`` the answer begins with the first item of the list, up to the value: base
    models and small models do not follow the instruction alone.

    Raises:
        ValueError: ``--length`` is too short for so many facts.

    """
    tokens = text_tokens(options.length, QUESTION, chat.tokenize)
    found = []
    for index in range(options.samples):
        rng = random.Random(f"{NAME}/{options.seed * 1_000_000 + index}")
        facts = several(rng, NAME, tokens, options.facts, chat.encode)
        sample = RulerSample(
            NAME,
            facts[0].context,
            QUESTION,
            f"- {facts[0].prefix}" if options.beginning else "",
            tuple(fact.answers[0] for fact in facts),
            options.tokens,
        )
        found.append(make_prompt(sample, chat.tokenize, chat.encode))
    return found


class FreeAnswers:
    """Asks a server for long answers and scores them; counts what the server must have counted.

    Args:
        plan: Policies and budgets; a label that ends with :data:`DECODE` evicts in decode as well.
        journal: Answers of earlier runs.
        endpoint: The server.

    """

    def __init__(self, plan: Plan, journal: Journal, endpoint: Endpoint) -> None:
        self._plan, self._journal, self._endpoint = plan, journal, endpoint
        self._lock = Lock()
        self.expected: Counter[str] = Counter({PREFILL: 0, IN_DECODE: 0})
        """Evictions that the requests must have caused; in decode, at least so many."""

    def xargs(self, cell: Cell, prompt: Prompt) -> dict[str, str | int]:
        """``vllm_xargs`` of a request; in decode the server's default interval holds."""
        wanted = self._plan.xargs(cell, prompt)
        if cell.label.endswith(DECODE):
            del wanted["kv_eviction_interval"]
        return wanted

    def answers(self, prompt: Prompt, bar: tqdm) -> dict[Cell, Answer]:
        """The answers to one prompt under every cell, the full cache first."""
        found = {}
        for cell in (FULL_CELL, *self._plan.cells()):
            found[cell] = self._answer(prompt, cell)
            bar.update()
        return found

    def _answer(self, prompt: Prompt, cell: Cell) -> Answer:
        wanted = prompt.ids, self._plan.limit(prompt), self.xargs(cell, prompt)
        answer = self._journal.find(*wanted)
        if answer is None:
            answer = self._endpoint.complete(*wanted, ignore_eos=True)
            self._journal.enter(*wanted, answer)
            self._expect(prompt, cell)
        logprobs = self._endpoint.score(prompt.ids, answer.ids, FULL_XARGS)
        said = share_said(prompt.sample.answers, answer.text)
        return Answer(answer.text, answer.ids, logprobs, said)

    def _expect(self, prompt: Prompt, cell: Cell) -> None:
        plan, length = self._plan, len(prompt.ids)
        if cell == FULL_CELL:
            return
        with self._lock:
            if plan.kept(cell.budget, length).evicts:
                self.expected[PREFILL] += 1
            if cell.label.endswith(DECODE):
                # The last token is never read; an eviction may wait for its turn some steps.
                self.expected[IN_DECODE] += (plan.limit(prompt) - 1 - WAIT) // INTERVAL

    def all(self, prompts: Sequence[Prompt], concurrency: int) -> list[dict[Cell, Answer]]:
        """Ask ``concurrency`` prompts at a time."""
        cells = 1 + len(self._plan.cells())
        with tqdm(total=len(prompts) * cells, unit="answer") as bar:
            return together(self.answers, prompts, concurrency, bar)


INTERVAL: int = EvictionConfig.model_fields["interval"].default
"""Decode steps between evictions that a server uses if nothing else is asked for."""


def compare(expected: Mapping[str, int], counted: Mapping[str, int]) -> None:
    """Compare the server's totals with what the requests must have caused.

    Raises:
        RuntimeError: A prompt was evicted more or less than once, or decode evictions are missing.

    """
    if counted[PREFILL] != expected[PREFILL] or counted[IN_DECODE] < expected[IN_DECODE]:
        raise RuntimeError(
            f"{expected[PREFILL]} evictions after prefill and at least {expected[IN_DECODE]} in "
            f"decode were expected, and the server counts {counted[PREFILL]} and "
            f"{counted[IN_DECODE]}"
        )


def labels(policies: Iterable[str]) -> dict[str, str]:
    """Policies by the labels of their rows: after prefill only, and in decode as well."""
    return {f"{policy}{when}": policy for policy in policies for when in ("", DECODE)}


def write(
    options: FreeOptions, folder: Path, asked: Sequence[Prompt],
    rows: Sequence[Mapping[Cell, Answer]], evictions: Mapping[str, Mapping[str, int]],
    notes: Sequence[str],
) -> str:  # fmt: skip
    """The result as JSON and Markdown, all answers in ``--work``; the Markdown is returned."""
    result = {
        **origin(options, folder),
        "interval": INTERVAL,
        "evictions": {name: dict(found) for name, found in evictions.items()},
        "notes": list(notes),
        "cells": summarize(rows),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    options.output.with_suffix(".md").write_text(text)
    answers = [
        {
            "context": index, "label": cell.label, "budget": cell.budget,
            "prompt_tokens": len(prompt.ids), "prefix": prompt.sample.prefix,
            "values": prompt.sample.answers, "share": answer.share, "answer": answer.text,
        }
        for index, (prompt, row) in enumerate(zip(asked, rows, strict=True))
        for cell, answer in row.items()
    ]  # fmt: skip
    (options.work / f"answers-{NAME}.json").write_text(json.dumps(answers, indent=1) + "\n")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    options = FreeOptions.parse(arguments)
    folder = Path(options.model or real_model())
    try:
        asked = prompts(options, LocalChat(folder))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    chosen = labels(options.policies)
    plan = Plan(
        chosen, options.budgets, (AWARE,), options.tokens, options.window,
        options.block_size or BLOCK_SIZE, options.store_dtype,
    )  # fmt: skip
    flags = ("--max-num-batched-tokens", SCORING_TOKENS, *profile_flags(options))
    journal = Journal(
        options.work / f"answers-{NAME}.jsonl",
        options.resume,
        server_key(options, folder, profile_flags(options)),
    )
    with start(options, Variant(NAME, flags, chosen), folder) as server:
        free = FreeAnswers(plan, journal, Endpoint(server.url, timeout_s=7200))
        rows = free.all(asked, options.concurrency)
    counted, expected = server.evictions(), dict(free.expected)
    evictions = dict(expected=expected, counted=counted)
    try:
        compare(expected, counted)
    except RuntimeError as error:
        # The answers are kept; the result says that they are not what the cells promise.
        write(options, folder, asked, rows, evictions, [str(error)])
        raise SystemExit(str(error)) from None
    print(write(options, folder, asked, rows, evictions, []))


if __name__ == "__main__":
    main()
