"""Documents in which everything is asked: each value stands in the text, and none is measured."""

import random
import re

import pytest

from benchmarks.quality import free
from benchmarks.quality.ruler import facts as measured
from benchmarks.quality.ruler import later, options, unseen
from benchmarks.quality.ruler.needles import CONTEXT, PREFIX, QUESTION
from vllm_kvevict.calibrate import documents
from vllm_kvevict.calibrate.documents import KINDS, TOLD, document
from vllm_kvevict.calibrate.vocabulary import functions, parameters


@pytest.mark.parametrize("make", dict.fromkeys(KINDS), ids=lambda make: make.__name__)
def test_every_value_stands_in_the_text(make) -> None:
    for seed in range(10):
        made = make(random.Random(seed), 2000)
        assert len(made.asked) >= 8 and 1200 <= len(made.text) <= 6000
        text = " ".join(made.text.lower().split())
        for one in made.asked:
            assert " ".join(one.value.lower().split()) in text, one
            assert one.question.strip() and "{" not in one.question + one.begin, one


def test_a_row_of_documents_has_all_kinds_and_many_wordings() -> None:
    made = [document(random.Random(seed), seed, 3000) for seed in range(len(KINDS) * 3)]
    assert len({one.text for one in made}) == len(made)
    # The words of a question without what differs: names, numbers, quotations.
    wordings = {
        re.sub(r"`[^`]*`|\"[^\"]*\"|\S*[_.\d]\S*|[A-Z]\w+", "", asked.question)
        for one in made
        for asked in one.asked
    }
    assert len(wordings) > 100
    again = document(random.Random(3), 3, 3000)
    assert (again.text, again.asked) == (made[3].text, made[3].asked)


def test_names_are_those_of_the_standard_library() -> None:
    assert len(functions()) > 500 and len(parameters()) > 300


def words(text: str) -> set[str]:
    """Words but for those of every question."""
    every = {"what", "which", "does", "where", "when", "with", "from", "that", "they", "this"}
    return set(re.findall(r"[a-z]{4,}", re.sub(r"\{\w+\}", " ", text).lower())) - every


def wordings() -> list[str]:
    tables = [value for value in vars(documents).values() if isinstance(value, tuple)]
    found = [
        f"{row[0]} | {row[1]}"
        for table in tables
        for row in table
        if isinstance(row, tuple) and len(row) == 2 and all(isinstance(x, str) for x in row)
    ]
    return found + [clause for clause, *_ in TOLD] + list(documents.STYLES)


def test_nothing_is_asked_as_it_is_measured() -> None:
    mine = wordings()
    assert len(mine) > 50
    asked = [CONTEXT, QUESTION, PREFIX, options.QUESTION, options.PREFIX, free.QUESTION]
    for theirs in [kind[0] for kind in measured.KINDS + unseen.KINDS + later.KINDS] + asked:
        for one in mine:
            common = words(one) & words(theirs)
            assert len(common) <= 1, f"{one} and {theirs} share {common}"
    for seed in range(60):
        made = document(random.Random(seed), seed, 3000)
        assert not [line for line in made.text.splitlines() if options.OPTION.match(line)]
        for one in made.asked:
            assert "default value" not in f"{one.question} {one.begin}".lower()
        names = set(re.findall(r"[A-Z][a-z]+", made.text + " ".join(a.value for a in made.asked)))
        assert not names & set(measured.FIRST + measured.LAST)
