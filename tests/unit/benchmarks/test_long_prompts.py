"""What the server reads and is made to say in prompts longer than its cache."""

import random
from argparse import Namespace

import pytest
from transformers import AutoTokenizer

from benchmarks.quality.endpoint import Followed
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.long_prompts import FACTS, PROSE, Setting, parts
from benchmarks.quality.long_report import joined, summarize
from benchmarks.quality.ruler import scattered as scattering
from benchmarks.quality.ruler.facts import sentences
from benchmarks.quality.ruler.scattered import scattered
from benchmarks.quality.ruler.unseen import KINDS

TOKENS, COUNT = 1200, 4


@pytest.fixture(autouse=True)
def short_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The docstrings of a small package: reading those of sympy takes 20 seconds."""
    monkeypatch.setattr(scattering, "sentences", lambda _: sentences("hypothesis"))


@pytest.mark.parametrize("seed", range(3))
def test_each_part_of_the_text_states_one_fact(seed):
    samples = scattered(random.Random(seed), TOKENS, COUNT, str.split)
    (text,) = {sample.context for sample in samples}
    assert TOKENS <= len(text.split()) < 1.15 * TOKENS
    for part, sample in enumerate(samples):
        (answer,) = sample.answers
        (stated,) = [
            found
            for statement, question, _, _ in KINDS
            if (name := named(question, sample.question)) is not None
            and (found := statement.format(n=name, x=answer)) in text
        ]
        assert text.count(stated) == 1
        place = text.index(stated) / len(text)
        assert part / COUNT - 0.05 < place < (part + 1) / COUNT + 0.05
        assert all(stated not in other.question + other.prefix for other in samples)
    assert len({sample.question for sample in samples}) == COUNT


def named(form: str, question: str) -> str | None:
    """The name that makes a question of its form."""
    before, after = form.split("{n}")
    if question.startswith(before) and question.endswith(after):
        return question[len(before) : len(question) - len(after)]
    return None


@pytest.fixture(scope="module")
def options() -> Namespace:
    return Namespace(context=300, continuation=16, facts=3, kind=PROSE)


def test_facts_are_asked_for_one_by_one_and_answered(tiny_model, options):
    options = Namespace(**vars(options) | {"kind": FACTS})
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = [
        (tokenizer.decode(ids), tokenizer.decode(rest))
        for ids, rest in parts(LocalChat(tiny_model), options, 1)
    ]
    assert len(found) == len({text for text, _ in found}) == options.facts
    for text, answer in found:
        assert answer.startswith(" ") and answer.strip() in text
        assert text.count("I will ask you about it afterwards.") == 1
        assert not text.endswith(" ")
    assert len({text[:250] for text, _ in found}) == 1


def test_prose_is_cut_in_two(tiny_model, options):
    ((ids, rest),) = parts(LocalChat(tiny_model), options, 1)
    assert (len(ids), len(rest)) == (300, 16)
    longer = Namespace(**vars(options) | {"context": 308, "continuation": 8})
    ((longer_ids, _),) = parts(LocalChat(tiny_model), longer, 1)
    assert longer_ids == ids + rest[:8]


def test_every_token_of_every_answer_counts_alike():
    """Losses by hand: one token of 4 nats and three of 2, against 1 nat each."""
    full = joined([Followed((-1.0,), (7,)), Followed((-1.0, -1.0, -1.0), (1, 2, 3))])
    mine = joined([Followed((-4.0,), (8,)), Followed((-2.0, -2.0, -2.0), (1, 2, 9))])
    evicted = Setting("probe", 512, 512)
    whole, found = summarize([{Setting(): full, evicted: mine}], Setting())
    assert whole["nll"]["mean"] == 1 and whole["excess"]["mean"] == 0
    assert found["nll"]["mean"] == 2.5 and found["excess"]["mean"] == 1.5
    assert found["same"]["mean"] == 0.5
