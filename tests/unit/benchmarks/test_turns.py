"""Several facts in one text, asked for in turn: prompts, counts, and means."""

import random
import re
from types import SimpleNamespace

import pytest

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.journal import Journal
from benchmarks.quality.measure import Plan
from benchmarks.quality.prompt import AGNOSTIC
from benchmarks.quality.ruler.later import KINDS
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.several import several, share_said
from benchmarks.quality.turns import Dialogues, TurnsOptions, compare, contexts, converse
from benchmarks.quality.turns_report import markdown, summarize


def stated(context: str) -> list[tuple[str, str, str]]:
    """Question, name and value of each fact of the kinds of ``later`` in a text."""
    found = []
    for statement, question, _, _ in KINDS:
        form = re.escape(statement).replace(r"\{n\}", "(?P<n>[A-Z][a-z]+ [A-Z][a-z]+)")
        form = form.replace(r"\{x\}", "(?P<x>[\\w ]+?)")
        for match in re.finditer(form, context):
            found.append((question.format(n=match["n"]), match["n"], match["x"]))
    return found


@pytest.mark.parametrize("facts", [1, 5, 12])
def test_each_fact_is_of_another_kind_and_its_value_occurs_once(facts):
    for seed in range(4):
        samples = several(random.Random(seed), "turns", 1150, facts, str.split)
        assert samples == several(random.Random(seed), "turns", 1150, facts, str.split)
        (context,) = {sample.context for sample in samples}
        assert 1150 <= len(context.split()) < 1300
        found = {question: value for question, _, value in stated(context)}
        assert len(stated(context)) == len(found) == facts
        assert len({name for _, name, _ in stated(context)}) == facts
        assert {s.question: s.answers[0] for s in samples} == found
        words = re.findall(r"\w+", context.lower())
        for value in found.values():
            sequence = value.lower().split()
            places = zip(*(words[i:] for i in range(len(sequence))), strict=False)
            assert sum(list(place) == sequence for place in places) == 1
        places = [context.index(sample.prefix) for sample in samples]
        assert places == sorted(places)
    other = several(random.Random(99), "turns", 1150, facts, str.split)
    assert other[0].context != context


@pytest.mark.parametrize(
    ("facts", "tokens", "message"),
    [
        (0, 1000, "0 facts; from 1 to 14"),
        (15, 9000, "15 facts"),
        (5, 399, "leaves 399 .* need 400"),
    ],
)
def test_texts_that_cannot_be_made_are_refused(facts, tokens, message):
    with pytest.raises(ValueError, match=message):
        several(random.Random(0), "turns", tokens, facts, str.split)


def test_values_count_as_whole_words_and_not_as_numbers_of_items():
    values = ("bone", "45", "vacuum cleaner", "7")
    assert share_said(values, "BONE and 45 and a Vacuum Cleaner and 7.") == 1
    assert share_said(values, "bones, 145, 45s, vacuum, cleaner, 0.7x") == 0
    assert share_said(values, "7. One\n 45) Two\n") == 0
    assert share_said(values, "44. It has 45.\n") == 0.25


class Chat:
    """A chat whose tokens are letters."""

    def __init__(self, head: str = "") -> None:
        self._head = head

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        head = self._head.format(len(messages))
        said = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
        return self.encode(f"{head}{said}<a>")


def sample(number: int) -> RulerSample:
    return RulerSample(
        "turns", "C" * 200, f"{number}?", f"It {number}", (f"v{number}",), max_tokens=4
    )


SAMPLES = [sample(number) for number in range(3)]
CONTEXT = "<u>" + "C" * 200 + "\n"


def answer(text: str) -> Completion:
    return Completion(text, tuple(map(ord, text)))


def test_a_turn_holds_the_questions_and_answers_before_it():
    replies = iter([" v0. \nWhat else?", " no", " v2"])
    asked = []

    def ask(prompt, cell):
        asked.append(("".join(map(chr, prompt.ids)), prompt.context, cell))
        return answer(next(replies))

    cell = Cell(AGNOSTIC, "snapkv", "25%")
    turns = converse(Chat(), SAMPLES, cell, ask)
    point = len(CONTEXT)
    assert asked == [
        (f"{CONTEXT}0?<a>It 0", point, cell),
        (f"{CONTEXT}0?<a>It 0 v0.<u>1?<a>It 1", point, cell),
        (f"{CONTEXT}0?<a>It 0 v0.<u>1?<a>It 1 no<u>2?<a>It 2", point, cell),
    ]
    assert [turn.score for turn in turns] == [1, 0, 1]


def test_a_template_that_changes_the_context_is_refused():
    with pytest.raises(ValueError, match="changes the context in turn 2"):
        converse(Chat("{} messages"), SAMPLES, FULL_CELL, lambda *_: answer("x"))


PLAN = Plan({"snapkv": "snapkv"}, ("25%", "100%"), (AGNOSTIC,), None, 32, 32)


class Endpoint:
    def __init__(self) -> None:
        self.xargs: list[dict] = []

    def complete(self, ids, max_tokens, xargs):
        assert max_tokens == 4
        self.xargs.append(xargs)
        return answer(f" v{len(self.xargs) % 3}")


def dialogues(path, resume=False) -> tuple[Dialogues, Endpoint]:
    endpoint = Endpoint()
    return Dialogues(Chat(), PLAN, Journal(path, resume, "model"), endpoint), endpoint


def test_what_the_server_must_count(tmp_path):
    """Of two contexts, one budget evicts; of their three turns, two reuse the store."""
    path = tmp_path / "answers.jsonl"
    first, endpoint = dialogues(path)
    rows = first.all([SAMPLES, SAMPLES[::-1]], concurrency=1)
    assert first.expected == {"evictions": 2, "stores_reused": 4}
    assert [list(row) for row in rows] == [[FULL_CELL, *PLAN.cells()]] * 2
    assert endpoint.xargs[:3] == [{"kv_eviction": "none"}] * 3
    assert endpoint.xargs[3:6] == [
        {
            "kv_eviction": "snapkv", "kv_eviction_budget": "25%", "kv_eviction_interval": 0,
            "kv_eviction_when": "always", "kv_eviction_at": len(CONTEXT),
        }
    ] * 3  # fmt: skip

    # A run that was cut off in the first context's second turn at 25%.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    again, endpoint = dialogues(path, resume=True)
    again.all([SAMPLES], concurrency=1)
    assert again.expected == {"evictions": 1, "stores_reused": 1}
    assert len(endpoint.xargs) == 5


def test_the_counts_of_the_server_are_compared():
    expected = {"evictions": 4, "stores_reused": 16}
    assert compare(expected, {**expected, "tokens_reused": 9}) == []
    (note,) = compare(expected, {"evictions": 20, "stores_reused": 0})
    assert "anew" in note
    for counted in ((5, 15), (4, 15), (19, 0), (0, 0), (5, 16)):
        with pytest.raises(RuntimeError, match="4 evictions and 16 reused stores were expected"):
            compare(expected, dict(zip(("evictions", "stores_reused"), counted, strict=True)))


def test_summary_by_turn_and_in_all():
    """Three contexts of two turns by hand."""
    cell = Cell(AGNOSTIC, "probe", "25%")
    rows = [
        {FULL_CELL: [1.0, 1.0], cell: [1.0, 0.0]},
        {FULL_CELL: [1.0, 0.0], cell: [0.0, 0.0]},
        {FULL_CELL: [1.0, 1.0], cell: [1.0, 1.0]},
    ]
    full, found = summarize(rows)
    assert [turn["mean"] for turn in full["turns"]] == pytest.approx([1, 2 / 3])
    assert [turn["mean"] for turn in found["turns"]] == pytest.approx([2 / 3, 1 / 3])
    # Wilson's interval of one success in three.
    assert found["turns"][1]["low"] == pytest.approx(0.0615, abs=1e-4)
    assert found["turns"][1]["high"] == pytest.approx(0.7923, abs=1e-4)
    assert full["all"]["mean"] == pytest.approx(5 / 6) and full["all"]["n"] == 3
    assert found["all"]["mean"] == pytest.approx(1 / 2)
    # Differences of the contexts: -1/2, -1/2, 0.
    assert found["difference"]["mean"] == pytest.approx(-1 / 3)
    assert (found["difference"]["low"], found["difference"]["high"]) == pytest.approx((-0.5, 0))
    assert full["difference"]["mean"] == full["difference"]["high"] == 0

    counted = dict(evictions=3, stores_reused=3, tokens_reused=700)
    text = markdown(
        {
            "cells": [full, found], "notes": ["A note."], "context_tokens": 200.0,
            "kept_tokens": {"25%": 64.0}, "model": "m", "command": "c", "date": "d",
            "commit": "e", "machine": "f", "options": dict(samples=3, seed=0),
            "evictions": dict(expected=dict(evictions=3, stores_reused=3), counted=counted),
        }
    )  # fmt: skip
    assert "| probe | 25% | 64 | 66.7 [20.8, 93.9] | 33.3 [6.1, 79.2] | 50.0" in text
    assert "| full cache | - | 200 | 100.0" in text and "A note." in text
    assert "3 turns reused a store (3 later turns), 700 tokens" in text


def test_contexts_have_the_wanted_length_and_differ_by_seed():
    chat = SimpleNamespace(
        encode=str.split, tokenize=lambda messages: messages[0]["content"].split()
    )
    options = TurnsOptions(samples=2, length=900, turns=3)
    asked = contexts(options, chat)
    assert asked == contexts(options, chat) and len(asked) == 2
    assert all(len(samples) == 3 for samples in asked)
    for samples in asked:
        prompt = f"{samples[0].context}\n{samples[0].question}".split()
        assert 880 <= len(prompt) < 980
    others = contexts(TurnsOptions(samples=2, length=900, turns=3, seed=1), chat)
    assert not {s[0].context for s in asked} & {s[0].context for s in others}
