"""The benchmark of eviction under pressure: its servers and its phases. No server runs."""

import json
from pathlib import Path

from benchmarks.pressure import swing
from benchmarks.pressure.servers import ALWAYS, PRESSURE, STOCK, WAYS, Servers


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
