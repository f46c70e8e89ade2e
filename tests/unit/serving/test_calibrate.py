"""``--kv-eviction-profile calibrate`` and ``--kv-eviction auto`` without a profile: when calibrate
runs, what it is told, and what happens if it cannot."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.test_recommend import nothing_ships, settled, write
from vllm_kvevict.calibrate import pace
from vllm_kvevict.config.profile import ModelIdentity
from vllm_kvevict.serving import calibrate
from vllm_kvevict.serving import profile as module
from vllm_kvevict.serving.identity import file_name, identity

__all__ = ["nothing_ships"]

pytestmark = pytest.mark.usefixtures("registered")

ASKED = dict(policy="auto", profile="calibrate")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run; each fails."""
    found: list[list[str]] = []

    def run(command: list[str], limit: float) -> Any:
        found.append(command)
        return 1, "error: it failed", calibrate.Progress(limit)

    monkeypatch.setattr(calibrate, "_run", run)
    return found


@pytest.fixture
def measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that is built has no tokenizer, which a calibration needs."""
    monkeypatch.setattr(calibrate, "cannot_calibrate", lambda _: None)


def test_a_profile_that_is_there_is_not_measured(
    build: Any, nothing_ships: Path, runs: list[list[str]]
) -> None:
    write(build, nothing_ships / "a.json")
    found = settled(build(ASKED))
    assert (found.policy, found.budget, runs) == ("probe", "12.5%", [])
    assert settled(build(dict(policy="ada-snapkv", profile="calibrate"))).profile is not None


def test_what_is_measured_is_served_and_found_again(
    build: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def fake(command: list[str], limit: float) -> Any:
        commands.append(command)
        cached = module.cache_folder() / file_name(identity(build()))
        cached.parent.mkdir()
        write(build, cached)
        return 0, "", calibrate.Progress(limit)

    monkeypatch.setattr(calibrate, "_run", fake)
    options = dict(dtype="float32", hf_overrides={"rope_theta": 500.0}, trust_remote_code=True)
    for _ in range(2):
        found = settled(build(ASKED, **options))
        assert (found.policy, found.budget) == ("probe", "12.5%")
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "vllm_kvevict.calibrate", model]
    assert command[command.index("--dtype") + 1] == "float32"
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"rope_theta": 500.0}
    assert "--trust-remote-code" in command and "--kv-eviction" not in command


@pytest.mark.parametrize("slow_bfloat16", [True, False])
def test_a_type_that_is_slow_here_is_left_to_calibrate(
    build: Any, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch, slow_bfloat16: bool
) -> None:
    """A profile does not depend on it, as test_layers.py says of the model's identity."""
    monkeypatch.setattr(calibrate, "lacks_bfloat16", lambda: slow_bfloat16)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(ValueError, match="it failed"):
            build(ASKED, dtype=dtype)
    given = [command[command.index("--dtype") + 1] for command in runs if "--dtype" in command]
    assert given == (["float32"] if slow_bfloat16 else ["bfloat16", "float32"])


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
    assert (
        "calibrate: calibrate ended with status 1 (it failed); calibrate by hand with vllm-kvevict "
        "calibrate" in said
    )
    assert model in said and "\n" not in said


def test_a_profile_of_another_model_is_a_failure(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_run", lambda _, limit: (0, "", calibrate.Progress(limit)))
    with pytest.raises(ValueError, match="what it wrote is another model's"):
        build(ASKED)


def test_nothing_is_measured_that_could_not_be_served(
    build: Any, monkeypatch: pytest.MonkeyPatch, runs: list[list[str]]
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not here")

    monkeypatch.setattr(calibrate, "check", refuse)
    assert settled(build(ASKED)).policy == "ada-defensive"
    assert runs == []


NODES = {
    "nnodes": dict(nnodes=2, tensor_parallel_size=2, distributed_executor_backend="mp"),
    "data parallel": dict(data_parallel_size=4, data_parallel_size_local=2),
}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
@pytest.mark.parametrize(
    "asked", [dict(policy="auto"), ASKED, dict(policy="ada-snapkv", profile="auto")], ids=str
)
def test_no_node_chooses_a_profile_for_itself(
    build: Any, nothing_ships: Path, runs: list[list[str]], asked: Any, nodes: dict[str, Any]
) -> None:
    """Not even if this node has one: another one may not."""
    write(build, nothing_ships / "a.json")
    with pytest.raises(ValueError, match="--kv-eviction-profile must be a file, the same") as why:
        build(asked, **nodes)
    assert "vllm-kvevict calibrate" in str(why.value) and "\n" not in str(why.value)
    assert runs == []


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_a_file_or_none_is_the_same_on_all_nodes(
    build: Any, tmp_path: Path, runs: list[list[str]], nodes: dict[str, Any]
) -> None:
    write(build, tmp_path / "profile.json")
    found = settled(build(dict(policy="auto", profile=str(tmp_path / "profile.json")), **nodes))
    assert (found.policy, found.budget) == ("probe", "12.5%")
    assert settled(build(dict(policy="auto", profile="none"), **nodes)).policy == "ada-defensive"
    assert settled(build(dict(policy="snapkv"), **nodes)).policy == "snapkv"
    assert runs == []


def test_ray_starts_all_nodes_with_one_profile(
    build: Any, nothing_ships: Path, runs: list[list[str]]
) -> None:
    """One process builds the configuration of every node."""
    write(build, nothing_ships / "a.json")
    nodes = NODES["data parallel"] | dict(data_parallel_backend="ray")
    assert settled(build(dict(policy="auto"), **nodes)).policy == "probe"
    assert runs == []


def test_a_headless_server_does_not_calibrate(
    model: str,
    parser: Any,
    runs: list[list[str]],
    measurable: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``vllm serve --headless`` starts: one sentence, before any process."""
    from vllm.entrypoints.cli import serve

    def starts(**_: Any) -> None:
        raise AssertionError("an engine starts")

    # A real one would wait for its head node.
    monkeypatch.setattr(serve, "CoreEngineProcManager", starts)
    args = parser.parse_args(
        [model, "--headless", "--skip-tokenizer-init", "--enforce-eager", "--kv-eviction", "auto"]
    )
    args.model, args.api_server_count = model, 0
    with pytest.raises(
        SystemExit, match="error: KV eviction: --kv-eviction-profile must be a file"
    ):
        serve.run_headless(args)
    assert runs == []


def test_ranks_on_one_node_may_calibrate(
    build: Any, runs: list[list[str]], measurable: None
) -> None:
    settled(build(dict(policy="auto"), data_parallel_size=2))
    assert len(runs) == 1


def test_lines_go_to_the_log_and_the_last_one_into_the_refusal(records: Any) -> None:
    script = "import sys; print('a\\rb'); sys.exit('error: too short')"
    assert calibrate._run([sys.executable, "-c", script], 60)[:2] == (1, "error: too short")
    assert [r.getMessage() for r in records] == [
        "calibrate: a", "calibrate: b", "calibrate: error: too short",
    ]  # fmt: skip
    assert calibrate._run([sys.executable, "-c", "pass"], 60)[0] == 0


AUTO: dict[str, Any] = dict(policy="auto")


def uncalibrated(records: Any) -> str:
    (line,) = [r.getMessage() for r in records if "has no profile that this server" in r.msg]
    return str(line)


def test_auto_measures_a_model_without_a_profile(
    build: Any, measurable: None, monkeypatch: pytest.MonkeyPatch, records: Any
) -> None:
    """Once: the second start finds the profile."""
    commands = []

    def fake(command: list[str], limit: float) -> Any:
        commands.append((command, limit))
        cached = module.cache_folder() / file_name(identity(build()))
        cached.parent.mkdir()
        write(build, cached)
        return 0, "", calibrate.Progress(limit)

    monkeypatch.setattr(calibrate, "_run", fake)
    for _ in range(2):
        found = settled(build(AUTO | dict(calibrate_seconds=77)))
        assert (found.policy, found.budget) == ("probe", "12.5%")
    ((command, limit),) = commands
    assert command[2] == "vllm_kvevict.calibrate" and limit == 77
    # It plans for less than the limit, and learns from as much as fits.
    assert float(command[command.index("--seconds") + 1]) == pytest.approx(0.9 * 77)
    said = [r.getMessage() for r in records if r.name == "vllm.kv_eviction.calibrate"]
    assert (
        "at most 77 s" in said[0] and "none skips it" in said[0] and "was calibrated in" in said[1]
    )


@pytest.mark.parametrize(
    "asked",
    [
        dict(policy="auto", profile="none"),
        dict(policy="auto", profile=None),
        dict(policy="ada-snapkv"),
        dict(policy="snapkv", profile="none"),
    ],
)
def test_nothing_is_measured_that_nobody_wants(
    build: Any, measurable: None, runs: list[list[str]], records: Any, asked: Any
) -> None:
    found = settled(build(asked))
    assert found.profile is None
    assert found.policy == asked["policy"].replace("auto", "ada-defensive")
    assert runs == []
    assert not [r for r in records if r.levelname == "WARNING" and "profile" in r.msg]


def test_auto_does_without_what_cannot_be_measured_and_says_what_it_costs(
    build: Any, measurable: None, runs: list[list[str]], records: Any
) -> None:
    found = settled(build(AUTO))
    assert (found.policy, found.budget, found.profile) == ("ada-defensive", "25%", None)
    said = uncalibrated(records)
    assert "auto uses ada-defensive with a budget of 25%" in said
    assert "calibrate ended with status 1 (it failed)" in said
    assert "after their context was evicted lose most" in said
    assert len(runs) == 1


def test_a_refusal_is_remembered_for_this_model(
    build: Any, measurable: None, runs: list[list[str]], records: Any
) -> None:
    for _ in range(2):
        settled(build(AUTO))
    assert len(runs) == 1
    (file,) = module.cache_folder().glob("*.failed")
    again = [r.getMessage() for r in records if "has no profile that this server" in r.msg][1]
    assert f"remove {file} to try again" in again
    settled(build(AUTO, hf_overrides={"vocab_size": 1000}))
    assert len(runs) == 2, "another model"
    value = json.loads(file.read_text())
    file.write_text(json.dumps(value | {"vllm_kvevict": "0.0"}))
    settled(build(AUTO))
    assert len(runs) == 3, "another version"
    file.unlink()
    settled(build(AUTO))
    assert len(runs) == 4
    with pytest.raises(ValueError, match="it failed"):
        build(ASKED)
    assert len(runs) == 5, "calibrate insists"


def test_a_crash_is_not_remembered(
    build: Any, measurable: None, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        calibrate, "_run", lambda *a: runs.append(a) or (-9, "Traceback", calibrate.Progress(1))
    )
    for _ in range(2):
        settled(build(AUTO))
    assert len(runs) == 2


def test_a_model_without_tokenizer_or_weights_is_not_measured(
    build: Any, runs: list[list[str]], records: Any
) -> None:
    settled(build(AUTO))
    settled(build(AUTO, load_format="dummy"))
    said = [r.getMessage() for r in records if "has no profile that this server" in r.msg]
    assert "(--skip-tokenizer-init)" in said[0] and "(--load-format dummy)" in said[1]
    assert runs == []


def test_of_several_api_servers_one_measures(build: Any, measurable: None, runs: Any) -> None:
    from vllm_kvevict.config.config import EvictionConfig

    config, asked = build(), EvictionConfig.parse("auto")
    parallel = config.parallel_config
    object.__setattr__(parallel, "_api_process_count", 2)
    object.__setattr__(parallel, "_api_process_rank", 1)
    assert calibrate.calibrated(None, config, asked) == (asked, None) and runs == []


@pytest.mark.parametrize("related", [False, True])
def test_a_related_models_profile_is_second_best(
    build: Any, nothing_ships: Path, measurable: None, runs: list[list[str]], records: Any,
    related: bool,
) -> None:  # fmt: skip
    """A base model's profile does not keep a fine-tune from being calibrated."""
    file = write(build, nothing_ships / "a.json")
    if related:
        value = json.loads(file.read_text())
        model = ModelIdentity(**value["model"]).model_copy(update={"name": "another"})
        file.write_text(json.dumps(value | {"model": model.model_dump()}))
    found = settled(build(AUTO))
    assert (found.policy, found.budget) == ("probe", "12.5%")
    assert len(runs) == related
    warned = [r.getMessage() for r in records if "may be another model's" in r.msg]
    assert len(warned) == related


@pytest.mark.parametrize("stopped", [None, "error", "time"])
def test_a_profile_that_had_too_little_time_is_used_with_a_warning(
    build: Any, nothing_ships: Path, records: Any, stopped: str | None
) -> None:
    file = write(build, nothing_ships / "a.json")
    value = json.loads(file.read_text())
    value["made"] = dict(lessons=dict(planned=60, learned=20, stopped=stopped, errors=[]))
    file.write_text(json.dumps(value))
    assert settled(build(AUTO)).policy == "probe"
    warned = [r.getMessage() for r in records if "learned from 20 of 60 texts" in r.getMessage()]
    assert len(warned) == (stopped == "time")
    assert all("vllm-kvevict calibrate" in line for line in warned)


def slow(bars: list[str], sleep: float) -> list[str]:
    """A command that prints lines and sleeps before each."""
    script = f"import time\nfor bar in {bars!r}:\n    time.sleep({sleep}); print(bar, flush=True)\n"
    return [sys.executable, "-c", script + "time.sleep(60)"]


def bar(name: str, done: int, count: int) -> str:
    """As tqdm prints one."""
    return (
        f"{name}: {100 * done // count:3d}%|###       | {done}/{count} [00:05<00:40,  1.9s/prompt]"
    )


def test_what_takes_longer_than_the_limit_is_ended(records: Any) -> None:
    started = time.monotonic()
    status, _, progress = calibrate._run(slow(["pid"], 0), 0.5)
    assert status is None and not progress.is_too_long
    assert time.monotonic() - started < 20


@pytest.mark.slow
def test_what_is_expected_to_take_longer_is_ended_early(records: Any) -> None:
    bars = [bar("probes", done, 24) for done in range(24)]
    started = time.monotonic()
    status, _, progress = calibrate._run(slow(bars, 0.5), 25)
    assert status is None and time.monotonic() - started < 20
    # 24 prompts of 0.5 s are two fifths of the work.
    assert 25 < progress.expected < 60
    said = [r.getMessage() for r in records]
    assert said[0].startswith("calibrate: probes 0 of 24")


def test_progress_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = calibrate.Progress(1000.0, started=now[0])

    def after(seconds: float, line: str) -> str | None:
        now[0] += seconds
        return progress.line(line)

    assert after(20, "written x") == "written x"
    assert after(0, bar("probes", 0, 24)) == "probes 0 of 24"
    assert after(5, bar("probes", 3, 24)) is None, "at most a line in ten seconds"
    # A twentieth took 5 s, so that all takes 100 s after 20 s of loading.
    assert progress.expected == pytest.approx(120)
    assert after(5, bar("probes", 6, 24)) == "probes 6 of 24, about 90 s left in all"
    assert after(50, bar("shares", 6, 6)) == "shares 6 of 6, about 49 s left in all"
    assert after(30, bar("quality", 4, 8)) == "quality 4 of 8, about 26 s left in all"
    assert after(20, "Loading weights:  50%|#    | 1/2 [00:01<00:01]") is None
    assert not progress.is_too_long
    assert after(9000, bar("quality", 5, 8)) is not None and progress.is_too_long


def test_what_calibrate_expects_ends_it_before_it_begins(records: Any) -> None:
    """By the sentence that calibrate prints, whose parts then say how far it is."""
    parts = {"probes": 700.0, "shares": 100.0, "quality": 400.0}
    started = time.monotonic()
    status, _, found = calibrate._run(slow([pace.sentence(parts)], 0), 1000)
    assert status is None and 1200 <= found.expected < 1200 + time.monotonic() - started
    progress = calibrate.Progress(2000.0)
    assert progress.line(pace.sentence(parts)) and not progress.is_too_long
    progress.line(bar("probes", 0, 30))
    began = progress.expected
    assert began == pytest.approx(1200, abs=5)
    progress.started = progress._first = time.monotonic() - 800
    progress.line(bar("shares", 6, 6))
    assert progress.expected == pytest.approx(1200, abs=5), "800 s of 1200 are over"


def test_too_slow_is_remembered_until_the_limit_is_higher(
    build: Any, measurable: None, monkeypatch: pytest.MonkeyPatch, records: Any
) -> None:
    limits = []

    def run(command: list[str], limit: float) -> Any:
        limits.append(limit)
        return None, "", calibrate.Progress(limit, expected=500.0)

    monkeypatch.setattr(calibrate, "_run", run)
    for limit in (100, 400, 600):
        settled(build(AUTO | dict(calibrate_seconds=limit)))
    assert limits == [100, 600]
    said = [r.getMessage() for r in records if "has no profile that this server" in r.msg]
    assert "it would take about 500 s, and the limit is 100 s (--kv-eviction-calibrate-s" in said[0]


@pytest.mark.slow
def test_ranks_of_calibrate_end_with_it(tmp_path: Path) -> None:
    """Also processes that calibrate started."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    status, last, _ = calibrate._run([sys.executable, "-c", script], 5)
    assert status is None
    for _ in range(100):
        try:
            state = Path(f"/proc/{int(last)}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        os.kill(int(last), 9)
        pytest.fail("it runs on")
