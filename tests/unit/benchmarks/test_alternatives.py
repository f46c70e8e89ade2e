"""The benchmark of the alternatives: its servers and its checks. No server runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.alternatives.answers import CITED, ask, cite_kvpress, prompts
from benchmarks.alternatives.measure import check_evictions, label, server_args
from benchmarks.alternatives.options import parse
from benchmarks.alternatives.report import markdown, ratios
from benchmarks.alternatives.ways import AUTO, STOCK, WAYS
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.journal import Journal
from benchmarks.quality.prompt import AGNOSTIC, AWARE, Prompt
from benchmarks.quality.ruler.sample import RulerSample
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
    args = parse(["--dtype", "bfloat16"])
    stock = server_args(STOCK, args, folder, None)
    block = 30 * 3 * 32 * 2 * 64 * 2  # layers, KV heads, tokens, K and V, head size, bytes
    memory = int(stock[stock.index("--kv-cache-memory-bytes") + 1])
    assert memory == (2 * 51 + 1) * block, "two requests of 1,628 tokens, and vLLM's null block"
    assert not any("eviction" in flag or "cache-dtype" in flag for flag in stock)
    wider = server_args(STOCK, parse(["--dtype", "float32"]), folder, None)
    assert int(wider[wider.index("--kv-cache-memory-bytes") + 1]) == 2 * memory
    assert wider[wider.index("--dtype") + 1] == "float32"
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
    assert own["fp8-auto-int4"] == [*own["fp8"], "--kv-eviction-store-dtype", "int4", *own["auto"]]
    for way in WAYS:
        flags = server_args(way, parse(["--dtype", "float32"]), folder, "25%")
        found = int(flags[flags.index("--kv-cache-memory-bytes") + 1])
        assert found == (memory if "--kv-cache-dtype" in flags else 2 * memory), way.key
    assert own["auto-12.5"] == [*own["auto"], "--kv-eviction-budget", "12.5%"]
    assert own["auto-int8"] == ["--kv-eviction-store-dtype", "int8", *own["auto"]]
    assert own["auto-12.5-int4"] == ["--kv-eviction-store-dtype", "int4", *own["auto-12.5"]]
    window = ["--kv-eviction", "streaming-llm", "--kv-eviction-budget"]
    assert own["streaming-llm"] == [*window, "25%"]
    assert own["streaming-llm-12.5"] == [*window, "12.5%"]
    assert own["offload"] == ["--kv-offloading-size", "1", "--kv-offloading-backend", "native"]
    with pytest.raises(ValueError, match="measure auto first"):
        server_args(BY_KEY["streaming-llm"], args, folder, None)


def test_a_profile_goes_to_auto_alone(folder: Path) -> None:
    args = parse(["--layers", "P.json"])
    given = [way.key for way in WAYS if "P.json" in server_args(way, args, folder, "25%")]
    assert given == [way.key for way in WAYS if way.policy == "auto"] and len(given) == 6


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


@pytest.mark.parametrize("samples", [0, 30])
def test_without_questions_the_table_has_the_load_alone(folder: Path, samples: int) -> None:
    args = parse(["--samples", str(samples), "--model", str(folder)])
    one = dict(key="stock", title="stock vLLM", load=LOAD, budget=None, capacity_tokens=3296)
    if samples:
        found = dict(mean=0.9, low=0.8, high=1.0)
        one["answers"] = {task: {AWARE: found, AGNOSTIC: found} for task in ("later", "s-niah")}
    else:
        assert prompts(args, folder) == []
    options = {name: str(value) for name, value in vars(args).items()}
    origin = dict(command="c", date="d", commit="abcdef12", machine="a CPU")
    text = markdown(origin | dict(options=options, rows=[one]))
    titles, _, row = text.strip().splitlines()[-3:]
    assert ("accuracy" in text, "`later`, known" in titles) == (bool(samples),) * 2
    assert titles.count("|") == row.count("|") == 10 + (4 if samples else 0)
    assert "| 2 (1.00x) | 20.0 (1.00x) |" in row


def test_a_number_of_questions_is_not_negative(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--samples", "-1"])
    assert "--samples: give a number of at least 0" in capsys.readouterr().err
