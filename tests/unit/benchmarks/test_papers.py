"""``make papers``: its policies exist, its command is one of benchmarks.quality, and its tables."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.papers import __main__ as papers
from benchmarks.papers.printed import FULL, PAPERS
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.intervals import Estimate
from benchmarks.quality.options import Options
from benchmarks.quality.results import Results
from vllm_kvevict.config.names import POLICY_NAMES


def test_every_policy_exists_and_every_paper_has_a_number() -> None:
    assert set(papers.POLICIES) <= set(POLICY_NAMES)
    assert {paper.name for paper in PAPERS} == {"Ada-KV", "NACL", "H2O", "SubGen"}
    for paper in PAPERS:
        assert {one.policy for one in paper.printed} <= {FULL, *paper.policies}
        assert any(one.policy != FULL for one in paper.printed) and paper.differs


@pytest.mark.parametrize("asked", [[], ["--models", "smollm2", "--samples", "3"]])
def test_the_tables_are_those_of_what_was_measured(
    asked: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Each policy has a number of its own; one was left out."""
    scores = {name: 0.3 + index / 100 for index, name in enumerate(papers.POLICIES)}
    left_out = "subgen-stream"
    commands = []

    def run(command: list[str], check: bool) -> None:
        options = Options.parse(command[3:])
        commands.append(options)
        assert options.scenarios == tuple(papers.SCENARIOS) and not options.kvpress
        estimates = {FULL_CELL: {"average": Estimate(0.9, 0.8, 0.95, 9)}}
        for scenario in options.scenarios:
            for budget in options.budgets:
                for name in options.policies:
                    if name != left_out:
                        mean = scores[name] + (scenario == "question-aware") * 0.4
                        cell = Cell(scenario, name, budget)
                        estimates[cell] = {"average": Estimate(mean, 0.0, 1.0, 9)}
        results = Results(options.tasks, {}, estimates, {})
        options.output.write_text(json.dumps(results.as_json()))

    monkeypatch.setattr(papers, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr("benchmarks.gemma3.gemma", lambda: tmp_path)
    out = tmp_path / "papers.json"
    words = ["--work", str(tmp_path / "work"), "--output", str(out), *asked]
    assert papers.main(words) == 0
    assert len(commands) == (1 if asked else 2)
    assert commands[0].samples == (3 if asked else 100)
    printed = capsys.readouterr().out
    assert printed.strip() == out.with_suffix(".md").read_text().strip()
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(paper.policies) for paper in PAPERS)
    for row in rows:
        name = row[0].strip("| `")
        known, unknown = row[2:5], row[5:8]
        if name == left_out:
            assert {one.strip(" |") for one in row[2:]} == {"-"}
        else:
            assert known == [f"{100 * scores[name] + 40:.0f}"] * 3
            assert {one.strip(" |") for one in unknown} == {f"{100 * scores[name]:.0f}"}
    (full, *_) = [line for line in printed.splitlines() if line.startswith("| full cache | 49.2")]
    assert full.count(" 90 ") == (6 if asked else 12)
    nacl = next(row for row in rows if row[0] == "| `nacl`")
    assert nacl[1].startswith("29.4 (") and "31 (long-text average" in nacl[1]
