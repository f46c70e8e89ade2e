"""What a target would have chosen of measured budgets, against sums done by hand."""

import pytest

from benchmarks.audit import ladder

LOSES = {"6.25%": 1.0, "12.5%": 0.4, "25%": 0.1, "50%": 0.02}


def rows(seed: int, kind: str, audits: dict[str, float], **changes: object) -> list[dict]:
    return [
        dict(policy="probe", kind=kind, seed=seed, budget=budget, audit=audit, answer=LOSES[budget])
        | changes
        for budget, audit in audits.items()
    ]


PASSES = dict(zip(LOSES, (0.5, 0.05, 0.03, 0.01), strict=True))
FAILS = dict.fromkeys(LOSES, 1.0)
ROWS = [*rows(0, "needle", PASSES), *rows(1, "other facts, not known", FAILS)]


def test_the_smallest_that_is_not_above():
    (prompts,) = ladder.of_rows(ROWS).values()
    first, second = prompts.values()
    assert [ladder.chosen(first, target) for target in (0.6, 0.05, 0.03, 0.02, 0.001)] == [
        (0.0625, 1.0), (0.125, 0.4), (0.25, 0.1), (0.5, 0.02), (1.0, 0.0),
    ]  # fmt: skip
    assert ladder.chosen(second, 0.9) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "part"), [(2.0, 0.0625), (1.0, 0.0625), (0.25, 0.1875), (0.02, 0.5), (0.0, 1.0)]
)
def test_one_budget_that_loses_as_much(loss, part):
    prompts = list(ladder.of_rows(ROWS)["probe"].values())
    assert ladder.budget_with(prompts, loss) == pytest.approx(part)


def test_prompts_without_all_audits_are_left_out():
    short = [*ROWS, *rows(2, "needle", {"25%": 0.1}), *rows(3, "needle", PASSES, audit=None)]
    assert ladder.of_rows(short)["probe"].keys() == ladder.of_rows(ROWS)["probe"].keys()


def test_the_table():
    lines = ladder.table(ROWS)
    assert "| probe | all | 0.03 | 62.5% | 40.6% | 0.0500 | 0.0 |" in lines
    assert "| probe | without other facts | 0.03 | 25.0% | 25.0% | 0.1000 | 0.0 |" in lines
    assert len(lines) == 2 + 2 * len(ladder.TARGETS)


def test_where_it_is_known_the_expected_loss_counts_in_place_of_the_audit():
    prompt = next(iter(ladder.of_rows(ROWS)["probe"].values()))
    expected = {b: row | {"expected": 2 * row["audit"]} for b, row in prompt.items()}
    for target in (0.6, 0.05, 0.03, 0.02, 0.001):
        assert ladder.chosen(expected, 2 * target) == ladder.chosen(prompt, target)
