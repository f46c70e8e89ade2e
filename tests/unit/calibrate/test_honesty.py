"""What is learned from and what is measured share no template, no name, no answer, no prose."""

import random
import re

import pytest

from benchmarks.quality import free
from benchmarks.quality.ruler import facts as measured
from benchmarks.quality.ruler import later, options, unseen
from benchmarks.quality.ruler import prose as needles_in
from benchmarks.quality.ruler.needles import CONTEXT, PREFIX, QUESTION
from benchmarks.quality.ruler.several import several
from vllm_kvevict.calibrate import facts as learned
from vllm_kvevict.calibrate.lessons import prose, source

MEASURED = measured.KINDS + unseen.KINDS + later.KINDS


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", re.sub(r"\{\w\}", " ", text).lower()))


def test_no_kind_of_fact_is_both_learned_and_measured() -> None:
    templates = [kind.statement for kind in learned.KINDS]
    templates += [f"{key} {thing}" for key, _ in learned.ATTRIBUTES for thing in learned.THINGS]
    asked = [CONTEXT, QUESTION, PREFIX, options.QUESTION, options.PREFIX, free.QUESTION]
    for theirs in [kind[0] for kind in MEASURED] + asked:
        for mine in templates:
            common = words(mine) & words(theirs)
            assert len(common) <= 1, f"{mine} and {theirs} share {common}"


def test_no_name_and_no_answer_is_both_learned_and_measured() -> None:
    names = set(learned.FIRST + learned.LAST + learned.CALLED)
    assert not names & set(measured.FIRST + measured.LAST)
    answers: list[set[str]] = [set(), set()]
    rng = random.Random(0)
    for _ in range(200):
        answers[0] |= {kind.value(rng) for kind in learned.KINDS}
        answers[0] |= {value(rng) for _, value in learned.ATTRIBUTES}
        answers[1] |= {value(rng) for *_, value in MEASURED}
    common = answers[0] & answers[1]
    # Numbers of one range may coincide; words may not.
    assert not [one for one in common if not one.isdigit()]


@pytest.mark.nightly
def test_no_prose_is_both_learned_and_measured() -> None:
    def runs(texts) -> set[tuple[str, ...]]:
        """Eight words in a row."""
        found: set[tuple[str, ...]] = set()
        for text in texts:
            tokens = re.findall(r"\w+", text.lower())
            found.update(zip(*(tokens[i:] for i in range(8)), strict=False))
        return found

    mine = runs(prose()) | runs(source())
    assert len(mine) > 20_000
    packages = [measured.sentences(package) for package in ("vllm", unseen.PACKAGE, later.PACKAGE)]
    for texts in [*packages, needles_in.sentences(), options.paragraphs()]:
        theirs = runs(texts)
        assert len(theirs) > 5_000
        assert len(theirs & mine) < 0.01 * len(theirs), "but for idioms of documentation"


def test_texts_with_several_facts_hold_nothing_but_what_is_held_apart_above() -> None:
    """The contexts of ``turns`` and ``free``: facts of ``later`` between its prose."""
    pool = set(measured.sentences(later.PACKAGE))
    for seed in range(3):
        samples = several(random.Random(seed), "turns", 1200, 12, str.split)
        head, _, text = samples[0].context.partition("\n")
        assert head == measured.CONTEXT.partition("\n")[0]
        for sample in samples:
            (name,) = {
                f"{first} {last}"
                for first in measured.FIRST
                for last in measured.LAST
                if f"{first} {last}" in sample.question
            }
            (fact,) = {
                statement.format(n=name, x=sample.answers[0])
                for statement, question, _, _ in later.KINDS
                if question.format(n=name) == sample.question
            }
            before, found, after = text.partition(fact)
            assert found
            text = f"{before.rstrip()} {after.lstrip()}".strip()
        # What is left is one stretch of the prose.
        for sentence in sorted(pool, key=len, reverse=True):
            text = text.replace(sentence, "")
        assert not text.strip()


@pytest.mark.parametrize(
    ("kinds", "chosen_by"),
    [(unseen.KINDS, measured.KINDS), (later.KINDS, measured.KINDS + unseen.KINDS)],
    ids=["unseen", "later"],
)
def test_nothing_unseen_is_in_what_the_form_was_chosen_by(kinds, chosen_by) -> None:
    for theirs in [kind[0] for kind in kinds]:
        for mine in [kind[0] for kind in chosen_by]:
            common = words(mine) & words(theirs)
            assert len(common) <= 1, f"{mine} and {theirs} share {common}"
    answers = [
        {value(random.Random(seed)) for *_, value in some for seed in range(200)}
        for some in (chosen_by, kinds)
    ]
    assert not [one for one in answers[0] & answers[1] if not one.isdigit()]
