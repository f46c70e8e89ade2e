"""The benchmark of the alternatives: its servers, its checks, its table. No server runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.alternatives import __main__ as command
from benchmarks.alternatives import measure, options
from benchmarks.alternatives.answers import CITED, ask, cite_kvpress
from benchmarks.alternatives.measure import check_evictions, label, reason, server_args
from benchmarks.alternatives.options import parse
from benchmarks.alternatives.report import markdown, ratios
from benchmarks.alternatives.ways import AUTO, STOCK, WAYS
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.journal import Journal
from benchmarks.quality.prompt import AGNOSTIC, AWARE, Prompt
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.server import ServerFailed
from tests.unit.benchmarks.fake_server import FakeServer, fresh
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.plugin import fold_flags

BY_KEY = {way.key: way for way in WAYS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of SmolLM2's shape. Its name differs from that of the fixture of the parser."""
    path = tmp_path / "SmolLM2-135M-Instruct"
    path.mkdir()
    config = dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_ways_differ_in_their_own_flags_alone(folder: Path) -> None:
    args = parse([])
    stock = server_args(STOCK, args, folder, None)
    block = 30 * 3 * 32 * 2 * 64 * 2  # layers, KV heads, tokens, K and V, head size, bytes
    memory = int(stock[stock.index("--kv-cache-memory-bytes") + 1])
    assert memory == (2 * 51 + 1) * block, "two requests of 1,628 tokens, and vLLM's null block"
    assert not any("eviction" in flag or "cache-dtype" in flag for flag in stock)
    assert "--enforce-eager" in stock
    assert "--enforce-eager" not in server_args(STOCK, parse(["--compile"]), folder, None)
    own = {}
    for way in WAYS:
        flags = server_args(way, args, folder, "25%")
        assert flags[: len(stock)] == stock, way.key
        own[way.key] = flags[len(stock) :]
    assert own["stock"] == []
    assert own["fp8"] == ["--kv-cache-dtype", "fp8"]
    assert own["auto"] == ["--kv-eviction", "auto"], "the user's default"
    assert own["fp8-auto"] == own["fp8"] + own["auto"]
    assert own["auto-12.5"] == [*own["auto"], "--kv-eviction-budget", "12.5%"]
    window = ["--kv-eviction", "streaming-llm", "--kv-eviction-budget"]
    assert own["streaming-llm"] == [*window, "25%"]
    assert own["streaming-llm-12.5"] == [*window, "12.5%"]
    assert own["offload"] == ["--kv-offloading-size", "1", "--kv-offloading-backend", "native"]
    with pytest.raises(ValueError, match="measure auto first"):
        server_args(BY_KEY["streaming-llm"], args, folder, None)


def test_a_profile_goes_to_auto_alone(folder: Path) -> None:
    args = parse(["--layers", "P.json"])
    given = [way.key for way in WAYS if "P.json" in server_args(way, args, folder, "25%")]
    assert given == ["auto", "auto-12.5", "fp8-auto"]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.key)
def test_vllm_takes_the_flags(way: Any, folder: Path, parser: Any) -> None:
    parsed = parser.parse_args([str(folder), *server_args(way, parse([]), folder, "25%")])
    settings = (fold_flags(parsed).additional_config or {}).get("kv_eviction")
    assert (settings is not None) == (way.policy is not None)
    if settings is not None:
        config = EvictionConfig.parse(settings)
        assert config is not None and config.policy == way.policy
    assert (parsed.kv_cache_dtype == "fp8") == way.key.startswith("fp8")
    if way.key == "offload-copies":
        connector = parsed.kv_transfer_config
        assert connector.kv_connector == "OffloadingConnector"
        assert connector.kv_connector_extra_config["cpu_bytes_to_use"] == 2**30
    if way.key == "offload":
        assert (parsed.kv_offloading_size, parsed.kv_offloading_backend) == (1, "native")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "stock,fp4"], "--rows: fp4; choose from stock, fp8, auto"),
        (["--samples", "0"], "--samples: give a number of at least 1"),
        (["--output-tokens", "0"], "--output-tokens: give a number of at least 1"),
        (["--memory", "some"], "--memory: give whole requests"),
        (["--length", "1600"], "--length: at most"),
        (["--model", "nowhere"], "--model: no folder nowhere"),
    ],
)
def test_bad_options(words: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert said in capsys.readouterr().err


def test_kvpress_must_be_installed_to_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(options, "PYTHON", Path("nowhere"))
    with pytest.raises(SystemExit):
        parse(["--kvpress", "run"])
    assert "--kvpress run: nowhere is missing; run `make setup-kvpress`" in capsys.readouterr().err
    assert parse(["--kvpress", "run", "--rows", "fp8"]).kvpress == "run"


def test_quick_sets_defaults_and_what_is_given_wins() -> None:
    args = parse(["--quick", "--samples", "3"])
    assert (args.samples, args.requests, args.prompt) == (3, 4, 512)
    assert args.output != parse([]).output, "a trial never replaces a published result"


LOG = """\
(APIServer pid=9) WARNING 11-26 06:20:09 [utils.py:255] This can cause errors like `OSError: [24]`.
(Worker pid=7) ERROR 11-26 06:21:41 [multiproc_executor.py:1063]     raise Exception(
(Worker pid=7) ERROR 11-26 06:21:41 [multiproc_executor.py:1063] Exception: Only on GPUs
(EngineCore pid=8) ERROR 11-26 06:21:41 [core.py:1510] RuntimeError: Worker failed, see above
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_reason_is_the_first_exception() -> None:
    assert reason(LOG) == "Only on GPUs"
    assert reason(LOG.splitlines()[0]) is None
    assert reason(LOG.splitlines()[-1]) is None, "it does not say why"
    assert reason("NotImplementedError: FP8 needs AVX-512.\n") == "FP8 needs AVX-512."


def test_labels_are_read_from_metrics() -> None:
    found = {'{max_budget="",budget="25%",block_size="32"}': 1.0}
    assert label(found, "budget") == "25%"
    assert label(found, "policy") is None and label(None, "budget") is None


def test_counters_must_agree_with_the_requests(tmp_path: Path) -> None:
    counted = dict(evictions=30, evictions_prefill=24)
    check_evictions(AUTO, counted, 24, tmp_path)
    with pytest.raises(RuntimeError, match="24 of 25 requests were evicted"):
        check_evictions(AUTO, counted, 25, tmp_path)
    check_evictions(STOCK, dict(evictions=0, evictions_prefill=0), 24, tmp_path)
    with pytest.raises(RuntimeError, match="30 evictions"):
        check_evictions(STOCK, counted, 24, tmp_path)


def sample_prompts() -> list[Prompt]:
    samples = [RulerSample(task, "c", "q", "", ("7",), 5) for task in ("later", "s-niah", "later")]
    return [Prompt(one, (index, 1, 2, 3), 3) for index, one in enumerate(samples)]


class FakeEndpoint:
    """Answers right if the request names an eviction point, or if it is the first prompt's."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def complete(self, ids: tuple[int, ...], max_tokens: int, xargs: dict[str, Any]) -> Completion:
        assert max_tokens == 5
        self.asked.append((ids[0], xargs))
        return Completion("7" if xargs or not ids[0] else "8", ids)


def test_a_server_that_evicts_is_asked_twice_and_another_once(tmp_path: Path) -> None:
    endpoint: Any = FakeEndpoint()
    journal = Journal(tmp_path / "evicting.jsonl", False, "m")
    answers, sent = ask(endpoint, sample_prompts(), True, 1, journal)
    at = {"kv_eviction_at": 3}
    assert endpoint.asked == [(0, at), (0, {}), (1, at), (1, {}), (2, at), (2, {})] and sent == 6
    assert answers["later"][AGNOSTIC]["mean"] == 1 and answers["later"][AWARE]["mean"] == 0.5
    assert answers["s-niah"][AWARE]["mean"] == 0 and answers["later"][AWARE]["n"] == 2
    # Wilson (1927) for 1 of 2, as every textbook has it.
    assert answers["later"][AWARE]["low"] == pytest.approx(0.0945, abs=1e-4)
    assert answers["later"][AWARE]["high"] == pytest.approx(0.9055, abs=1e-4)

    again, sent = ask(endpoint, sample_prompts(), True, 1, journal)
    assert sent == 0 and len(endpoint.asked) == 6 and again == answers

    endpoint = FakeEndpoint()
    journal = Journal(tmp_path / "stock.jsonl", False, "m")
    answers, sent = ask(endpoint, sample_prompts(), False, 1, journal)
    assert sent == 3 and all(not xargs for _, xargs in endpoint.asked)
    assert answers["later"][AGNOSTIC] == answers["later"][AWARE]


def test_kvpress_is_cited_for_the_same_questions_only(folder: Path, tmp_path: Path) -> None:
    found = cite_kvpress(parse([]), folder, ["25%", "12.5%", "6.25%"])
    # As docs/quality.md has them.
    entry = {"mean": 0.35, "low": 0.264, "high": 0.447, "n": 100}
    assert found["12.5%"]["later"][AGNOSTIC] == pytest.approx(entry)
    assert found["25%"]["later"][AGNOSTIC]["mean"] == pytest.approx(0.55)
    assert found["6.25%"] == {} and "s-niah" not in found["25%"]
    assert cite_kvpress(parse(["--length", "1000"]), folder, ["25%"]) == {"25%": {}}
    assert cite_kvpress(parse(["--seed", "1"]), folder, ["25%"]) == {"25%": {}}
    assert cite_kvpress(parse([]), tmp_path, ["25%"]) == {"25%": {}}, "another model"
    for part, said in (("samples of each task", "are not named"), ("policy", "no table")):
        broken = tmp_path / "broken.md"
        broken.write_text(CITED.read_text().replace(part, "things"))
        with pytest.raises(ValueError, match=said):
            cite_kvpress(parse([]), folder, ["25%"], broken)


LOAD = dict(peak_running=2, output_tokens_per_s=20.0, ttft_ms_median=30000.0, ttft_ms_p99=60000.0,
            tpot_ms_median=50.0, tpot_ms_p99=0.0)  # fmt: skip


def test_ratios() -> None:
    faster = LOAD | dict(peak_running=8, output_tokens_per_s=30.0, ttft_ms_median=15000.0)
    assert ratios(faster, LOAD) == {
        "peak_running": 4, "output_tokens_per_s": 1.5, "ttft_ms_median": 0.5, "ttft_ms_p99": 1,
        "tpot_ms_median": 1,
    }  # fmt: skip


def test_the_table_has_every_row() -> None:
    half = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    all_tasks = {task: {AGNOSTIC: half, AWARE: half} for task in ("later", "s-niah")}
    served = dict(budget=None, capacity_tokens=3264, answers=all_tasks)
    fast = LOAD | dict(peak_running=9, tpot_ms_p99=80.0)
    rows = [
        dict(key="stock", title="stock vLLM", load=LOAD, **served),
        dict(key="auto", title="`auto`", load=fast, **served | dict(budget="25%")),
        dict(key="fp8", title="FP8", error="FP8 needs AVX-512."),
        dict(key="kvpress", title="kvpress", budget="25%", answers={"later": {AGNOSTIC: half}},
             cited="later_kvpress.md"),
    ]  # fmt: skip
    options = dict(memory="2", prompt="1500", output_tokens="128", requests="24", samples="8",
                   length="1250")  # fmt: skip
    origin = dict(command="c", date="d", commit="e", machine="m", versions={"vllm": "0.32.0"})
    text = markdown(origin | dict(model="M", options=options, rows=rows))
    lines = text.splitlines()
    cell = "50 [25, 75]"
    assert (
        f"| stock vLLM | 100% | {cell} | {cell} | {cell} | {cell} | 3,264 | 2 (1.00x) | "
        "20.0 (1.00x) | 30.0 (1.00x) | 60.0 (1.00x) | 50 (1.00x) | 0 |"
    ) in lines
    assert any(line.startswith("| `auto` | 25% |") and "| 9 (4.50x) |" in line for line in lines)
    assert f"| kvpress | 25% | {cell} |{' not measured |' * 3}{' cannot serve |' * 7}" in lines
    assert f"| FP8 |  |{' did not start |' * 11}" in lines and "- FP8: FP8 needs AVX-512." in lines
    assert "those of later_kvpress.md, which is another run" in text
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6 and len({line.count("|") for line in table}) == 1


class Info:
    """The information metrics of a server."""

    def __init__(self, url: str, model: str) -> None:
        pass

    def metrics(self, name: str) -> dict[str, float] | None:
        return {'{budget="25%",kv_cache_size_tokens="3264"}': 1.0}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    load = LOAD | dict(completed=24, failed=0)
    answers = {task: {AGNOSTIC: dict(mean=1.0)} for task in ("later", "s-niah")}
    found = fresh(ill=("--kv-offloading-size",), says=LOG)
    monkeypatch.setattr(measure, "Server", found)
    monkeypatch.setattr(measure, "Endpoint", Info)
    monkeypatch.setattr(measure, "measure", lambda *_: dict(load))
    monkeypatch.setattr(measure, "ask", lambda *_: (answers, 100))
    return found


def test_a_run_measures_every_way_and_resumes_after_the_last(
    folder: Path, tmp_path: Path, servers: type[FakeServer]
) -> None:
    words = ["--work", str(tmp_path / "work")]
    rows = command.run(parse(words), folder, [])
    keys = [way.key for way in WAYS]
    assert [row["key"] for row in rows] == [*keys, "kvpress", "kvpress"]
    assert servers.started == keys
    (failed,) = [row for row in rows if "error" in row]
    assert (failed["key"], failed["error"]) == ("offload", "Only on GPUs")
    streaming = rows[keys.index("streaming-llm")]["flags"]
    assert streaming[-2:] == ["--kv-eviction-budget", "25%"], "the budget that auto chose"
    assert [row["budget"] for row in rows[-2:]] == ["25%", "12.5%"]
    assert [row["cited"] for row in rows[-2:]] == ["later_kvpress.md"] * 2
    other = ["--work", str(tmp_path / "other"), "--length", "1300", "--rows", "kvpress"]
    longer = command.run(parse(other), folder, [])
    assert [row["cited"] for row in longer[-2:]] == [None, None], "nothing of it was taken"

    journal = tmp_path / "work" / "rows.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed while it wrote
    servers.started.clear()
    assert command.run(parse([*words, "--resume"]), folder, []) == rows
    assert servers.started == keys[-1:]
    servers.started.clear()
    command.run(parse([*words, "--resume", "--samples", "50"]), folder, [])
    assert servers.started == keys, "other options, other rows"
    command.run(parse([*words, "--rows", "fp8"]), folder, [])
    assert servers.started[len(keys) :] == ["stock", "fp8", "auto"]


def test_a_way_that_must_start_ends_the_run(
    folder: Path, tmp_path: Path, servers: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse(["--work", str(tmp_path)])
    journal = Journal(tmp_path / "a.jsonl", False, "m")
    monkeypatch.setattr(servers, "ill", ("--kv-eviction", "--kv-transfer-config"))
    with pytest.raises(ServerFailed):
        measure.measure_way(AUTO, args, folder, [], journal, None)
    monkeypatch.setattr(servers, "ill", ())
    monkeypatch.setattr(servers, "metric", lambda self, name: 0.0)
    with pytest.raises(RuntimeError, match="nothing was copied to host memory"):
        measure.measure_way(BY_KEY["offload"], args, folder, [], journal, None)
    monkeypatch.setattr(servers, "evictions", lambda self: dict(evictions=0, evictions_prefill=0))
    with pytest.raises(RuntimeError, match="0 of 24 requests were evicted"):
        measure.measure_way(AUTO, args, folder, [], journal, None)
