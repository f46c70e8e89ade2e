"""Part 3 of the GPU benchmark without a server: who is asked what, and what failures leave."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import serving
from benchmarks.gpu.jobs import START_S, services
from benchmarks.gpu.model import LLAMA_8B, TINY, ring_bytes, token_bytes
from benchmarks.gpu.prefill import NAME, prefill_ms


def arguments(folder: Path, **values: Any) -> Namespace:
    given: dict[str, Any] = dict(
        tiny=False, loads=serving.loads("6000/500/4/96,32000/4000/4/16"), shares=[12.5],
        prefills=[32768], few=16, repeats=3, policies=["auto", "ada-snapkv"], steps=[2048],
        block_size=16, max_num_seqs=32,
        serve_args="", scratch=folder, output=folder / "serving.json", until=0, only=None,
        together=1,
    )  # fmt: skip
    return Namespace(**given | values)


def test_stock_and_evicting_servers_have_the_same_memory(tmp_path):
    found = {one.name: one for one in services(arguments(tmp_path), LLAMA_8B)}
    assert list(found) == [
        "stock-6000", "8x-6000", "8x-6000-steps-2048", "8x-6000-ada-snapkv",
        "stock-32000", "8x-32000", "8x-32000-steps-2048", "8x-32000-ada-snapkv", "nothing-to-evict",
    ]  # fmt: skip
    policies = {name: job.key.get("policy") for name, one in found.items() for job in one.jobs}
    assert policies["8x-6000"] == policies["8x-6000-steps-2048"] == "auto"
    assert policies["8x-6000-ada-snapkv"] == "ada-snapkv" and policies["stock-6000"] is None
    profile = ["--kv-eviction-profile", str(tmp_path / "profile.json")]
    assert found["8x-6000"].eviction[2:4] == profile
    assert "--kv-eviction-profile" not in found["8x-6000-ada-snapkv"].eviction
    assert found["8x-6000-steps-2048"].eviction[-2:] == ["--max-num-batched-tokens", "2048"]
    assert token_bytes(LLAMA_8B) == 131072
    rings = ring_bytes(LLAMA_8B, 32, 32)
    assert rings == 32 * 32 * 32 * 32 * 128 * 2
    assert ring_bytes(LLAMA_8B, 100, 32) == 512 * 2**20
    for length, memory in ((6000, 26000), (32000, 144000)):
        stock, ours = found[f"stock-{length}"], found[f"8x-{length}"]
        assert stock.kv_bytes == ours.kv_bytes + rings == memory * 131072
        assert stock.longest == ours.longest and ours.eviction[-1] == "12.5%"
    room, beside = found["stock-32000"], found["nothing-to-evict"]
    assert (room.kv_bytes, room.longest) == (beside.kv_bytes, beside.longest)
    assert beside.eviction[-1] == "14000", "twice the longest answer of a prompt, and more"
    asked = [(job.key["case"], job.key.get("load")) for job in room.jobs]
    few = [("not memory-bound", number) for number in (1, 2, 3)]
    assert asked == [("prefill", None), *few, ("memory-bound", None)]
    seeds = [job.load.seed for job in room.jobs if job.load]
    assert len(set(seeds)) == len(seeds), "the prefix cache answers no prompt"


def test_each_server_fits_into_a_call_and_all_into_the_time(tmp_path):
    found = services(arguments(tmp_path), LLAMA_8B)
    assert all(START_S + sum(job.seconds for job in one.jobs) < 450 for one in found)
    assert sum(START_S + sum(job.seconds for job in one.jobs) for one in found) < 25 * 60


def test_a_server_of_its_own_where_no_stock_server_has_room(tmp_path):
    args = arguments(tmp_path, loads=serving.loads("600/20/2/4"), prefills=[600], few=8)
    found = {one.name: one for one in services(args, LLAMA_8B | TINY)}
    assert [len(one.jobs) for one in found.values()] == [1, 1, 1, 1, 4, 3]
    assert found["stock-room"].kv_bytes >= 8 * 620 * token_bytes(LLAMA_8B | TINY)


def test_what_a_log_says():
    log = "x KV eviction attention on this rank: flash kernel, 1 bytes\n" + serving.KERNELS
    assert serving.logged(log) == dict(cuda_kernels=True, attention="flash")
    assert serving.logged("") == dict(cuda_kernels=False)


def test_a_prefill_by_the_engines_clock():
    class Engine:
        model = "m"
        sum = count = 0.0
        prompts: list[list[int]] = []  # noqa: RUF012

        def metric(self, name: str) -> float:
            return {f"{NAME}_sum": self.sum, f"{NAME}_count": self.count}[name]

        def post(self, path: str, body: dict[str, Any]) -> None:
            assert len(body["prompt"]) == 7 and min(body["prompt"]) >= 3
            self.prompts.append(body["prompt"])
            self.count += 1
            self.sum += 9.0 if self.count == 1 else self.count / 1000

    engine: Any = Engine()
    assert prefill_ms(engine, 7, 100, 2) == pytest.approx([2.0, 3.0])
    assert engine.prompts[0] != engine.prompts[1] != engine.prompts[2]
