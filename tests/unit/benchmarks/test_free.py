"""Long free answers: prompts, counts, and what is made of the answers."""

from types import SimpleNamespace

import pytest

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.free import (
    QUESTION,
    FreeAnswers,
    FreeOptions,
    compare,
    labels,
    prompts,
)
from benchmarks.quality.free_report import Answer, markdown, summarize
from benchmarks.quality.journal import Journal
from benchmarks.quality.measure import Plan
from benchmarks.quality.prompt import AWARE, Prompt
from benchmarks.quality.ruler.sample import RulerSample

DEFAULT_INTERVAL = 128


def test_prompts_ask_for_everything_and_begin_with_the_first_fact():
    chat = SimpleNamespace(
        encode=str.split, tokenize=lambda messages: messages[0]["content"].split()
    )
    options = FreeOptions(samples=2, length=1200)
    found = prompts(options, chat)
    assert found == prompts(options, chat) and found[0].ids != found[1].ids
    for prompt in found:
        text, values = " ".join(prompt.ids), prompt.sample.answers
        assert len(values) == len(set(values)) == 12
        head, question, beginning = text.partition(QUESTION)
        assert question and 1150 < len(prompt.ids) < 1350
        prefix = beginning.strip().removeprefix("- ")
        assert f"- {prefix}" == prompt.sample.prefix
        assert f"{prefix} {values[0]}" in head, "the first fact in the text"
        assert prompt.point(AWARE) == len(prompt.ids)
    bare = prompts(FreeOptions(samples=1, length=1200, beginning=False), chat)[0]
    assert bare.ids == found[0].ids[: len(bare.ids)] and bare.sample.prefix == ""
    assert " ".join(bare.ids).endswith(QUESTION)


PROMPT = Prompt(
    RulerSample("free", "text", "all?", "", ("one", "two"), max_tokens=400),
    tuple(range(320)), 300,
)  # fmt: skip
CELLS = [Cell(AWARE, f"snapkv{when}", b) for when in ("", ", in decode") for b in ("25%", "100%")]


class Endpoint:
    """Answers "one" in the order of its requests, and scores what it is asked to."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.scored: list[tuple] = []

    def complete(self, ids, max_tokens, xargs, ignore_eos):
        assert ids == PROMPT.ids and max_tokens == 400 and ignore_eos
        self.asked.append(xargs)
        return Completion("one", (7, len(self.asked)))

    def score(self, ids, tokens, xargs):
        self.scored.append((ids, tokens, xargs))
        return tuple(-float(token) for token in tokens)


def answers(path, resume=False) -> tuple[FreeAnswers, Endpoint]:
    plan = Plan(labels(["snapkv"]), ("25%", "100%"), (AWARE,), 400, 32, 32)
    endpoint = Endpoint()
    return FreeAnswers(plan, Journal(path, resume, "model"), endpoint), endpoint


def test_requests_and_what_the_server_must_count(tmp_path):
    free, endpoint = answers(tmp_path / "answers.jsonl")
    (row,) = free.all([PROMPT], concurrency=1)
    assert list(row) == [FULL_CELL, *CELLS]
    settings = [
        (x.get("kv_eviction_budget"), x.get("kv_eviction_interval")) for x in endpoint.asked
    ]
    assert settings == [(None, None), ("25%", 0), ("100%", 0), ("25%", None), ("100%", None)]
    assert [x["kv_eviction"] for x in endpoint.asked] == ["none"] + ["snapkv"] * 4
    # Every answer is scored with the full cache, after the prompt.
    assert endpoint.scored == [(PROMPT.ids, (7, n), {"kv_eviction": "none"}) for n in range(1, 6)]
    assert row[CELLS[0]] == Answer("one", (7, 2), (-7.0, -2.0), 0.5)
    # 25% evicts, 100% covers the prompt. 400 - 1 - 64 steps are two intervals.
    assert free.expected["evictions_prefill"] == 2
    assert free.expected["evictions_decode"] == 2 * ((400 - 1 - 64) // DEFAULT_INTERVAL)

    again, endpoint = answers(tmp_path / "answers.jsonl", resume=True)
    assert again.all([PROMPT], concurrency=1) == [row]
    assert not endpoint.asked and len(endpoint.scored) == 5
    assert again.expected == {"evictions_prefill": 0, "evictions_decode": 0}


def test_the_counts_of_the_server_are_compared():
    expected = {"evictions_prefill": 4, "evictions_decode": 14}
    compare(expected, {"evictions_prefill": 4, "evictions_decode": 16})
    for prefill, decode in ((3, 16), (5, 16), (4, 13)):
        with pytest.raises(RuntimeError, match="4 evictions after prefill and at least 14"):
            compare(expected, {"evictions_prefill": prefill, "evictions_decode": decode})


def answer(ids: list[int], first: float, rest: float, share: float) -> Answer:
    """Logprobs of ``first`` in the first 128 tokens, of ``rest`` in 128 more."""
    return Answer("", tuple(ids), (first,) * 128 + (rest,) * 128, share)


def test_summary_is_paired():
    """Three contexts by hand."""
    cell = Cell(AWARE, "probe", "25%")
    rows = [
        {FULL_CELL: answer([1, 2, 3], -1, -2, 0.5), cell: answer([1, 9, 3], -2, -4, 0.25)},
        {FULL_CELL: answer([1, 2, 3], -1, -4, 0.5), cell: answer([1, 2, 3], -1, -4, 0.5)},
        {FULL_CELL: answer([1, 2, 3], -3, -3, 1.0), cell: answer([9, 2, 3], -6, -6, 0.25)},
    ]
    full, found = summarize(rows)
    mean = {name: value["mean"] for name, value in found.items() if isinstance(value, dict)}
    assert full["nll_first"]["mean"] == pytest.approx(5 / 3)
    assert full["nll"]["mean"] == pytest.approx((1.5 + 2.5 + 3) / 3)
    assert mean["nll_first"] == pytest.approx(3) and mean["nll"] == pytest.approx(11.5 / 3)
    assert mean["excess_first"] == pytest.approx((1 + 0 + 3) / 3)
    assert mean["excess"] == pytest.approx((1.5 + 0 + 3) / 3)
    assert (full["share"]["mean"], mean["share"]) == pytest.approx((2 / 3, 1 / 3))
    assert mean["share_difference"] == pytest.approx((-0.25 + 0 - 0.75) / 3)
    # A bootstrap of three paired differences reaches from the least to the largest.
    bounds = found["share_difference"]["low"], found["share_difference"]["high"]
    assert bounds == pytest.approx((-0.75, 0))
    assert full["excess"]["low"] == full["excess"]["high"] == 0
    # Equal tokens before the first difference: 1, all 3, 0.
    assert (found["same_tokens"], full["same_tokens"]) == (1, 3)

    counted = dict(evictions_prefill=3, evictions_decode=0)
    text = markdown(
        {
            "cells": [full, found], "notes": ["A note."], "interval": 128, "model": "m",
            "command": "c", "date": "d", "commit": "e", "machine": "f",
            "options": dict(samples=3, length=1250, facts=12, tokens=256, seed=0),
            "evictions": dict(expected=counted, counted=counted),
        }
    )  # fmt: skip
    assert "| probe | 25% | 3.000 [" in text and "| +1.333 [" in text and "A note." in text
    assert text.rstrip().endswith("| 33.3 [25.0, 50.0] | -33.3 [-75.0, +0.0] | 1 |")
