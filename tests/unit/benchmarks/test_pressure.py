"""The benchmark of eviction under pressure: its servers, its phases, its report. No server runs."""

import json
from pathlib import Path
from typing import Any

from benchmarks.pressure import report, swing
from benchmarks.pressure.servers import ALWAYS, PRESSURE, STOCK, WAYS, Servers
from benchmarks.quality.prompt import AGNOSTIC, AWARE


def _model(folder: Path) -> Path:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_way_has_the_same_memory_and_stock_vllm_no_flag_of_ours(tmp_path: Path) -> None:
    servers = Servers(_model(tmp_path), "ada-defensive", 192, tmp_path, layers="auto")
    commands = {way: servers.start(way, 4, 70).command for way in WAYS}
    for command in commands.values():
        # Three blocks of 32 tokens for each, and vLLM's null block; 2 bytes a number, K and V.
        bytes_ = command[command.index("--kv-cache-memory-bytes") + 1]
        assert int(bytes_) == (4 * 3 + 1) * 32 * 2 * 3 * 16 * 2 * 2
    assert not any(one.startswith("--kv-eviction") for one in commands[STOCK])
    for way in (ALWAYS, PRESSURE):
        assert commands[way][commands[way].index("--kv-eviction-when") + 1] == way
        assert commands[way][-2:] == ["--kv-eviction-profile", "auto"]
    inside = Servers(_model(tmp_path), "probe", 192, tmp_path, prefill_interval=256)
    flag = "--kv-eviction-prefill-interval"
    assert [flag in inside.start(way, 2, 70).command for way in WAYS] == [False, True, False]


def test_phases_take_turns_and_no_two_loads_share_prompts() -> None:
    loads = swing.loads(5, 16)
    assert [name for name, _ in loads] == ["quiet", "burst", "quiet", "burst", "quiet"]
    assert [load.num_prompts for _, load in loads] == [4, 16, 4, 16, 4]
    assert len({load.seed for _, load in loads}) == 5


def test_the_report_has_a_line_for_each_measurement_and_a_picture(tmp_path: Path) -> None:
    counted = dict(evictions=0, steps=90, preemptions=7, whole=3, evicted=1, sampled=44)
    score = dict(mean=0.5, low=0.25, high=0.75)
    needle = [
        {"way": way, "memory": memory, AWARE: score, AGNOSTIC: score, "peak_running": 5,
         "output_tokens_per_s": 10.0, **counted}
        for way in WAYS for memory in (2, 4)
    ]  # fmt: skip
    burst = dict(way=STOCK, phase="burst", output_tokens_per_s=5.0, sampled_a_step=1.5, **counted)
    result: dict[str, Any] = {
        "command": "c", "date": "d", "commit": "e", "machine": "m",
        "options": {"policy": "ada-defensive", "budget": "192"},
        "lossless": {
            "load": "l", "same_answers": 7, "answers": 8, "tokens_an_answer": 64,
            "throughput_ratios": [0.97, 1.0, 1.01], "throughput_ratio_median": 1.0,
            "counted": {PRESSURE: counted},
        },
        "swing": {"load": "l", "rows": [burst]},
        "needle": {"load": "l", "rows": needle},
    }  # fmt: skip
    text = report.markdown(result)
    assert "7 of 8 answers" in text and "1.000x" in text and "0.970 to 1.010" in text
    assert "| stock | burst | 5 | 44 | 1.50 | 7 | 0 | 3 of 4 |" in text
    assert text.count("50 [25, 75] | 50 [25, 75] | 5 | 10 |") == len(needle)
    report.plot(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
