"""The benchmark of decode servers: its servers, its memory, its table. No vLLM runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from benchmarks import decode_node
from benchmarks.decode_node import COLUMNS, kv_bytes, parse, ratios, run, server_args, table
from tests.unit.benchmarks.fake_server import FakeServer, fresh


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_memory(model: Path) -> None:
    args = parse([])
    block = 30 * 3 * 32 * 2 * 64 * 2  # layers, KV heads, tokens, K and V, head size, bytes
    assert kv_bytes(args, model, "2") == (2 * 51 + 1) * block
    assert kv_bytes(args, model, "all") == (24 * 51 + 1) * block
    assert kv_bytes(args, model, "84M") == 84_000_000
    for wrong in ("0", "some", "2.5", "M"):
        with pytest.raises(ValueError, match="--memory: give whole requests"):
            kv_bytes(args, model, wrong)


def test_the_servers_of_a_pair_differ_in_eviction_alone() -> None:
    args = parse(["--groups", "1"])
    stock, evicting = (server_args(args, 1000, evicts) for evicts in (False, True))
    assert evicting[: len(stock)] == stock
    assert evicting[len(stock) :] == [
        "--kv-eviction", "auto", "--kv-eviction-budget", "12.5%",
        "--kv-eviction-options.groups", "1",
    ]  # fmt: skip
    connector = json.loads(stock[stock.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "DecodeBenchConnector"
    assert connector["kv_connector_extra_config"]["fill_std"] > 0


def fake_measure(server: FakeServer, model: Path, load: decode_node.Load) -> dict[str, float]:
    row = {key: 1.0 for _, key, _ in COLUMNS}
    rate = 30.0 if server.evicts else 10.0
    return row | dict(output_tokens_per_s=rate, completed=load.num_prompts, failed=0)


def test_pairs_and_ratios(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_node, "Server", FakeServer)
    monkeypatch.setattr(decode_node, "measure", fake_measure)
    args = parse(["--memory", "2, all", "--repeats", "2"])
    rows = run(args, model)
    assert [row["setting"] for row in rows] == ["stock vLLM", "eviction"] * 4
    assert ratios(rows) == {"2": [3.0, 3.0], "all": [3.0, 3.0]}
    lines = table(rows).splitlines()
    assert len(lines) == 10 and "| 2 | 76 | eviction | 30.0 | 1 | 1.0 | 1.0 | 1 | 100 |" in lines


def test_a_server_that_does_not_evict_ends_the_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = fresh(evictions=lambda self: {"evictions": 0})
    monkeypatch.setattr(decode_node, "Server", never)
    monkeypatch.setattr(decode_node, "measure", fake_measure)
    with pytest.raises(RuntimeError, match="0 evictions"):
        run(parse(["--memory", "2"]), model)


def test_another_checkout(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its server evicts too and imports the plugin from there; another folder is refused."""
    package = tmp_path / "vllm_kvevict"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)
    args = parse(["--memory", "2", "--also", str(tmp_path)])
    with pytest.raises(ValueError, match=r"--also: .* is no checkout"):
        run(args, model)
    package.mkdir()
    (package / "__init__.py").touch()
    envs = []

    class Server(FakeServer):
        def __enter__(self) -> Self:
            envs.append(self.env)
            return super().__enter__()

    monkeypatch.setattr(decode_node, "Server", Server)
    monkeypatch.setattr(decode_node, "measure", fake_measure)
    rows = run(args, model)
    names = [row["setting"].split(", commit ") for row in rows]
    assert names[:2] == [["stock vLLM"], ["eviction"]] and len(names[2][1]) >= 8
    assert ratios(rows) == {"2": [3.0, 3.0]}
    assert envs[:2] == [{}, {}]
    code = "import vllm_kvevict; print(vllm_kvevict.__file__)"
    command, env = [sys.executable, "-c", code], dict(os.environ) | envs[2]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == package.resolve() / "__init__.py"
