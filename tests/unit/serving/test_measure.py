"""``--kv-eviction-profile measure``: when calibrate runs, and what it is told."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.test_recommend import nothing_ships, settled, write
from vllm_kvevict.serving import measure
from vllm_kvevict.serving import profile as module
from vllm_kvevict.serving.profile import cached_name, identity

__all__ = ["nothing_ships"]

pytestmark = pytest.mark.usefixtures("registered")

ASKED = dict(policy="auto", profile="measure")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run; each fails."""
    found: list[list[str]] = []
    monkeypatch.setattr(measure, "_run", lambda command: found.append(command) or "it failed")
    return found


def test_a_profile_that_is_there_is_not_measured(
    build: Any, nothing_ships: Path, runs: list[list[str]]
) -> None:
    write(build, nothing_ships / "a.json")
    found = settled(build(ASKED))
    assert (found.policy, found.budget, runs) == ("probe", "12.5%", [])
    assert settled(build(dict(policy="ada-snapkv", profile="measure"))).profile is not None


def test_what_is_measured_is_served_and_found_again(
    build: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def calibrate(command: list[str]) -> None:
        commands.append(command)
        cached = module.cache_folder() / cached_name(identity(build()))
        cached.parent.mkdir()
        write(build, cached)

    monkeypatch.setattr(measure, "_run", calibrate)
    options = dict(dtype="float32", hf_overrides={"rope_theta": 500.0}, trust_remote_code=True)
    for _ in range(2):
        found = settled(build(ASKED, **options))
        assert (found.policy, found.budget) == ("probe", "12.5%")
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "vllm_kvevict.calibrate", model]
    assert command[command.index("--dtype") + 1] == "float32"
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"rope_theta": 500.0}
    assert "--trust-remote-code" in command and "--kv-eviction" not in command


def test_a_cap_below_the_usual_budget_measures(build: Any, runs: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="it failed"):
        build(ASKED | dict(max_budget=512))
    assert len(runs) == 1


@pytest.mark.parametrize("policy", ["auto", "probe"])
def test_a_budget_from_what_answers_lose_measures(
    build: Any, runs: list[list[str]], policy: str
) -> None:
    with pytest.raises(ValueError, match="it failed"):
        build(ASKED | dict(policy=policy, budget="loss=0.05"))
    assert len(runs) == 1


def test_a_failure_is_one_sentence_with_the_command(build: Any, model: str, runs: Any) -> None:
    with pytest.raises(ValueError) as caught:
        build(ASKED)
    said = str(caught.value)
    assert "measure: it failed; measure by hand with vllm-kvevict calibrate" in said
    assert model in said and "\n" not in said


def test_a_profile_of_another_model_is_a_failure(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_run", lambda _: None)
    with pytest.raises(ValueError, match="what it wrote is another model's"):
        build(ASKED)


def test_nothing_is_measured_that_could_not_be_served(
    build: Any, monkeypatch: pytest.MonkeyPatch, runs: list[list[str]]
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not here")

    monkeypatch.setattr(measure, "check", refuse)
    assert settled(build(ASKED)).policy == "ada-defensive"
    assert runs == []


def test_lines_go_to_the_log_and_the_last_one_into_the_refusal(records: Any) -> None:
    script = "import sys; print('a\\rb'); sys.exit('error: too short')"
    assert measure._run([sys.executable, "-c", script]) == (
        "calibrate ended with status 1 (too short)"
    )
    assert [r.getMessage() for r in records] == [
        "calibrate: a", "calibrate: b", "calibrate: error: too short",
    ]  # fmt: skip
    assert measure._run([sys.executable, "-c", "pass"]) is None
