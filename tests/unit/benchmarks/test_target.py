"""The benchmark of budgets by target: its arithmetic, its table and its options."""

import pytest

from benchmarks.audit.prompts import FOUR, KINDS
from benchmarks.target.__main__ import parse
from benchmarks.target.measure import share
from benchmarks.target.report import fields, markdown

ROWS = [
    dict(policy="probe", kind=FOUR, tokens=1000, rung=rung, kept=kept, nats=0.01, answer=answer)
    for rung, kept, answer in (("25%", 0.25, 0.01), ("100%", 1.0, 0.0), ("6.25%", 0.0625, 0.5))
]


@pytest.mark.parametrize("kept, value", [("6.25%", 0.0625), ("100%", 1.0), ("short", 0.5)])
def test_what_was_kept(kept, value):
    assert share(kept) == value


def test_a_line_of_the_table():
    assert fields(ROWS) == [
        "3", "43.8%", "0.1700", "0.5000", "33.3", "1", "0", "1", "0", "1", "0",
    ]  # fmt: skip


def test_the_page():
    origin = dict(command="c", date="d", commit="e", machine="m", versions={"vllm": "1"})
    counted = {"probe": dict(trials=9, tokens_tried=600, target_short=0)}
    text = markdown({**origin, "target": 0.03, "rows": ROWS, "counted": counted})
    assert "- probe: 9 trials, which computed 600 tokens, 20.0% of those of the prompts." in text
    assert text.count(f"| probe | {FOUR} | 3 |") == 1 == text.count("| probe | all | 3 |")
    assert text.count("\n| probe |") == 2


def test_options(tmp_path):
    options = parse(["--kinds", "0,3", "--policies", "probe", "--out", str(tmp_path / "a.json")])
    assert options.kinds == [KINDS[0], KINDS[3]] and options.policies == ["probe"]
    assert options.target == 0.03 and len(parse([]).kinds) == 6
    for wrong in (["--prompts", "0"], ["--target", "-1"], ["--out", "a.md"]):
        with pytest.raises(SystemExit):
            parse(wrong)
