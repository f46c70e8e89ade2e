"""RULER's tasks: what is asked stands in the text, once, and the answer can be found there."""

import re
from collections import Counter

import pytest

from benchmarks.quality.ruler import facts
from benchmarks.quality.ruler.prose import paragraphs, sentences
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tasks import TASKS, characters_for, make

NEEDLE = re.compile(r"One of the special magic numbers for ([a-z-]+) is: (\d{7})\.")


@pytest.fixture(autouse=True)
def little_prose(monkeypatch):
    """The docstrings of a small package: reading all of vLLM's takes 13 s."""
    some = facts.sentences("hypothesis")
    assert len(some) > 500
    monkeypatch.setattr(facts, "sentences", lambda package: some)


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_repeatable_and_differ(task):
    samples = [make(task, 5000, seed) for seed in range(6)]
    assert samples == [make(task, 5000, seed) for seed in range(6)]
    assert len({sample.context for sample in samples}) == 6
    for sample in samples:
        assert sample.task == task and len(set(sample.answers)) == len(sample.answers)
        assert all(answer in sample.context for answer in sample.answers)
        assert sample.score(f"X {', '.join(sample.answers).upper()}") == 1
        assert sample.score("nothing") == 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [600, 3000])
def test_lengths(task, tokens):
    """Counting five characters a token, and a template of 100 tokens."""

    def count(sample: RulerSample) -> int:
        return 100 + (len(sample.context) + len(sample.question)) // 5

    characters = characters_for(task, tokens, count)
    lengths = [count(make(task, characters, seed)) for seed in range(8)]
    assert 0.85 * tokens < sum(lengths) / 8 < 1.15 * tokens


@pytest.mark.parametrize(
    ("task", "keys", "values", "asked"),
    [("s-niah", 1, 1, 1), ("mk-niah", 4, 1, 1), ("mv-niah", 1, 4, 1), ("mq-niah", 4, 1, 4)],
)
def test_needles(task, keys, values, asked):
    for seed in range(5):
        sample = make(task, 4000, seed)
        found = NEEDLE.findall(sample.context)
        assert len(found) == keys * values and len(dict(found)) == keys
        wanted = [key for key in dict(found) if key in sample.question]
        assert len(wanted) == asked and all(key in sample.prefix for key in wanted)
        assert {v for k, v in found if k in wanted} == set(sample.answers)
        one = len(sample.answers) == 1
        assert ("number for" in sample.question) == one
        assert sample.prefix.endswith(" is" if one else " are")


def test_keys_of_needles_differ_in_one_group():
    needle = re.compile(r"One of the special magic numbers for ([0-9a-f-]{36}) is: (\d{7})\.")
    for seed in range(5):
        sample = make("uuids", 4000, seed)
        found = dict(needle.findall(sample.context))
        assert len(found) == 4
        groups = [set(group) for group in zip(*(key.split("-") for key in found), strict=True)]
        assert sorted(map(len, groups)) == [1, 1, 1, 1, 4]
        (asked,) = (key for key in found if key in sample.question)
        assert asked in sample.prefix and sample.answers == (found[asked],)


def test_a_default_value_is_documented_once():
    for seed in range(20):
        sample = make("defaults", 4000, seed)
        name = re.search(r"`(\w+)`", sample.question)[1]
        assert f"`{name}`" in sample.prefix
        (line,) = (x for x in sample.context.splitlines() if re.search(rf"\b{name}\b", x))
        assert line.startswith(f"{name} (")
        stated = re.search(r"defaults to ([^)]+)\):", line)[1]
        assert stated.strip("`\"'") == sample.answers[0]
        assert sample.answers[0] not in ("None", "True", "False")


def test_tracking_follows_the_copies():
    for seed in range(5):
        sample = make("vt", 4000, seed)
        text = sample.context.rpartition("following text.")[2]
        value = re.search(r"assigned the value (\d+) in", sample.question)[1]
        holds: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
            holds[name] = holds.get(source, source)
        assert [name for name, held in holds.items() if held == value] == list(sample.answers)
        assert len(sample.answers) == 5


def test_counting():
    for seed in range(5):
        sample = make("cwe", 4000, seed)
        words = re.findall(r"\d+\. (\w+)", sample.context.rpartition("appear most often.")[2])
        counts = Counter(words)
        assert {word for word, _ in counts.most_common(10)} == set(sample.answers)
        assert min(counts[word] for word in sample.answers) > max(
            count for word, count in counts.items() if word not in sample.answers
        )
        sample = make("fwe", 4000, seed)
        counts = Counter(sample.context.partition("coded words. ")[2].split())
        assert [word for word, _ in counts.most_common(4)] == ["....", *sample.answers]


def test_question_names_one_person():
    for seed in range(12):
        sample = make("qa", 5000, seed)
        name = re.search(r"[A-Z]\w+ [A-Z]\w+", sample.question.removeprefix("Question: In "))[0]
        documents = [text for text in sample.context.split("Document ") if name in text]
        assert len(documents) == 1 and sample.answers[0] in documents[0]
        assert sample.score(f"It is {sample.answers[0]}.") == 1


def test_prose_is_sentences():
    assert sum(map(len, paragraphs())) > 90_000 and len(sentences()) > 700
    assert len(set(paragraphs())) == len(paragraphs())
    assert not any(mark in text for text in paragraphs() for mark in (">>>", "::=", "\n"))
