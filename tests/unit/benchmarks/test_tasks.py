"""Tasks: the answers are in the text, and training never sees what evaluation asks for."""

import itertools
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality import data, tasks
from benchmarks.quality.tokenizer import build
from benchmarks.quality.words import NOUNS

NEEDLE = re.compile(r"the magic number for (\w+ \w+): (\d+ \d+)\.")
LINE = re.compile(r"line (\w+ \w+): (\d+ \d+) is the content\.")


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def answers_by_reading(task: str, context: str, question: str) -> list[str]:
    """The answers, read from the text alone."""
    if task == "lines":
        (asked,) = re.findall(r"of line (\w+ \w+)\?", question)
        return [value for key, value in LINE.findall(context) if key == asked]
    if task == "vt":
        (value,) = re.findall(r"hold (\d+ \d+)\?", question)
        chain = re.findall(rf"store {value} -> (\w+)\.", context)
        while found := re.findall(rf"copy {chain[-1]} -> (\w+)\.", context):
            chain += found
        return chain
    if task in ("cwe", "fwe"):
        return [word for word, _ in Counter(context.split()).most_common(5 if task == "cwe" else 3)]
    asked = re.findall(r"\w+ \w+", question.split(" for ")[1].replace(" and ", ", "))
    pairs = [(name, v) for name in asked for key, v in NEEDLE.findall(context) if key == name]
    return [f"{name} {v}" if len(asked) > 1 else v for name, v in pairs]


@pytest.mark.parametrize("task", tasks.TASKS)
@settings(max_examples=15, deadline=None)
@given(words=st.sampled_from([150, 400, 1500]), seed=st.integers(0, 10**6))
def test_the_answers_stand_in_the_text(task, words, seed):
    sample = tasks.make(task, words, seed)
    assert sample == tasks.make(task, words, seed)
    expected = answers_by_reading(task, sample.context, sample.question)
    if task in ("cwe", "fwe"):
        assert sorted(expected) == sorted(sample.answers)
    else:
        assert expected == list(sample.answers)
    assert abs(tasks.length(sample.context) - words) <= max(20, words // 12)


def test_scores_count_the_answers_found():
    sample = tasks.Sample("mv-niah", "", "", ("123 456", "789 111", "222 333", "444 555"))
    assert sample.score("123 456, 222 333.") == 0.5
    assert sample.score("444 555, 222 333, 789 111 and 123 456") == 1
    assert sample.score("1123 456 and 789, 1112") == 0
    assert sample.score("") == 0


def material(context: str) -> set[str]:
    """Names and values of a context, and its filler sentences."""
    facts = {part for pair in NEEDLE.findall(context) + LINE.findall(context) for part in pair}
    facts |= set(re.findall(r"store (\d+ \d+) -> \w+\.", context))
    filler = NEEDLE.sub("", re.sub(r"(store|copy) [^.]*\.", "", context))
    return facts | {s.strip() for s in filler.split(".") if len(s.split()) > 6}


def test_training_never_sees_what_evaluation_asks_for():
    rng = random.Random(0)
    seen = set().union(*(material(data.dialogue(rng, 512).context) for _ in range(300)))
    asked = set().union(
        *(
            material(tasks.make(task, 400, seed).context)
            for task in tasks.TASKS
            if task not in ("cwe", "fwe")
            for seed in range(40)
        )
    )
    assert len(seen) > 3000 and len(asked) > 3000
    assert not seen & asked


def test_needles_stand_at_positions_that_training_leaves_free():
    def slots(context: str) -> set[int]:
        return {i for i, s in enumerate(context.split(". ")) if s.startswith("the magic")}

    rng = random.Random(1)
    places: Counter[bool] = Counter()
    for evaluation in (False, True):
        for _ in range(30):
            found = tasks.needles(tasks.Writer(rng, evaluation), 300, 1, 1, 1, 1)
            (slot,) = slots(found.context)
            assert (slot % tasks.HELD_OUT == 5) == evaluation
            places[evaluation] += 1
    assert places[True] == places[False] == 30


def test_the_vocabulary_covers_every_task(tokenizer):
    rng = random.Random(2)
    for tokens in (64, 128, 256, 1024):
        for _ in range(30):
            found = data.dialogue(rng, tokens)
            ids, answer = data.encode(tokenizer, found, tokens)
            assert tokenizer.unk_token_id not in ids
            assert len(ids) == len(answer) <= tokens and any(answer)


def test_training_and_serving_see_the_same_prompt(tokenizer):
    sample = tasks.make("mk-niah", 200, 3)
    turn = tasks.Dialogue(sample.context, [(sample.question, sample.answers)])
    ids, answer = data.encode(tokenizer, turn, 1000)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{sample.context}\n{sample.question}"}],
        add_generation_prompt=True,
    )["input_ids"]
    assert ids[: answer.index(True)] == chat
    reply = [i for i, right in zip(ids, answer, strict=True) if right]
    assert reply[-1] == tokenizer.eos_token_id
    assert sample.score(tokenizer.decode(reply[:-1])) == 1


def test_names_share_no_noun_before_each_was_used():
    for evaluation in (False, True):
        names = tasks.Writer(random.Random(1), evaluation).names(len(NOUNS) + 40)
        assert len(set(names)) == len(names)
        assert {name.split()[1] for name in names[: len(NOUNS)]} == set(NOUNS)


def test_values_of_evaluation_share_no_number():
    values = tasks.Writer(random.Random(1), evaluation=True).values(400)
    numbers = [number for value in values for number in value.split()]
    assert len(set(numbers)) == len(numbers) == 800
    more = tasks.Writer(random.Random(1), evaluation=True).values(1000)
    assert len(set(more)) == 1000


def test_variables_are_followed_from_copy_to_copy(tokenizer):
    """In tokens, what holds a value stands next to it: the answer is read without going back."""
    sample = tasks.make("vt", 200, 1)
    turn = tasks.Dialogue(sample.context, [(sample.question, sample.answers)], sample.separator)
    ids, answer = data.encode(tokenizer, turn, 1000)
    reply = tokenizer.convert_ids_to_tokens(
        [i for i, right in zip(ids, answer, strict=True) if right]
    )
    assert tuple(reply[:-1]) == sample.answers and len(reply) == 5
    tokens = tokenizer.convert_ids_to_tokens(ids)
    for source, target in itertools.pairwise(sample.answers):
        at = [i for i, token in enumerate(tokens[:-5]) if token == source]
        assert target in {tokens[i + 1] for i in at}
