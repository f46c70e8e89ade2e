"""Recorded answers are scored over the cache that they were generated over.

The oracle is the server itself: the log-probabilities that it gave for each token when it generated
the answer, after its eviction and with the full cache.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.test_lora import RANK, adapter_and_merged
from tests.e2e.test_server import BASE
from tests.models import random_prompt
from vllm_kvevict.tools.measure.__main__ import main

__all__ = ["adapter_and_merged"]

NEW_TOKENS = 40
ASKED = dict(
    temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True,
    logprobs=1,
)  # fmt: skip
ALLOWING = ["--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "96", "--kv-eviction-allow",
            "none"]  # fmt: skip
TEXTS = "one two three four five six seven eight nine ten " * 20


def record(server: Server, path: Path, bodies: list[dict[str, Any]]) -> list[list[float]]:
    """Ask, write the requests with their answers, and return each token's log-probability."""
    found = []
    with path.open("w") as out:
        for body in bodies:
            body = {"model": server.model, **ASKED, **body}
            address = "/v1/completions"
            if "messages" in body:
                address = "/v1/chat/completions"
                body["logprobs"] = True
            response = server.post(address, body)
            out.write(json.dumps({"request": body, "response": response}) + "\n")
            given = response["choices"][0]["logprobs"]
            found.append(
                [one["logprob"] for one in given["content"]]
                if "messages" in body
                else given["token_logprobs"]
            )
    return found


def scores(server: Server, recorded: Path, *more: str) -> list[dict[str, Any]]:
    out = recorded.with_suffix(".scores")
    words = ["--recorded", str(recorded), "--base-url", server.url, "--output", str(out), *more]
    assert main(words) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def bodies(**more: Any) -> list[dict[str, Any]]:
    prompts = [random_prompt(300 + 70 * seed, seed=seed) for seed in range(4)]
    chat = [{"role": "user", "content": TEXTS}, {"role": "user", "content": "and then"}]
    return [*({"prompt": prompt, **more} for prompt in prompts), {"messages": chat, **more}]


def check(found: list[dict[str, Any]], given: list[list[float]], key: str) -> None:
    assert [row["tokens"] for row in found] == [NEW_TOKENS] * len(given)
    assert [row[key] for row in found] == pytest.approx([sum(one) for one in given], abs=2e-2)


@pytest.mark.parametrize(
    "lora", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["plain", "lora"]
)
def test_scores_are_the_likelihoods_of_the_generation(
    tiny_model, adapter_and_merged, tmp_path, lora
):
    flags = [*BASE, *ALLOWING]
    if lora:
        flags += [
            "--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK),
            "--lora-modules", f"mine={adapter_and_merged[0]}",
        ]  # fmt: skip
    with Server(tiny_model, flags, tmp_path / "log") as server:
        once = {"vllm_xargs": {"kv_eviction_interval": 0}}
        asked = bodies(**once)
        if lora:
            asked = [asked[0], {**asked[0], "model": "mine"}]
        given = record(server, tmp_path / "evicted.jsonl", asked)
        before = server.metric("vllm_kvevict:evictions_total")
        assert before == len(asked)
        found = scores(server, tmp_path / "evicted.jsonl")
        assert server.metric("vllm_kvevict:evictions_total") >= before + len(asked)
        check(found, given, "evicted")
        assert all(row["evicted"] != row["full"] for row in found)
        if lora:
            return
        full = record(server, tmp_path / "full.jsonl", bodies(vllm_xargs={"kv_eviction": "none"}))
        rows = scores(server, tmp_path / "full.jsonl")
        check(rows, full, "full")
        assert [row["full"] for row in rows] == [row["evicted"] for row in rows], "asked for none"


def test_a_small_budget_loses_and_a_whole_one_does_not(tiny_model, tmp_path, capsys):
    with Server(tiny_model, [*BASE, *ALLOWING], tmp_path / "log") as server:
        recorded = tmp_path / "recorded.jsonl"
        prompts = [{"prompt": random_prompt(400 + seed, seed=seed)} for seed in range(8)]
        # Of a stock server: its clients name no settings.
        record(
            server, recorded, [{**one, "vllm_xargs": {"kv_eviction": "none"}} for one in prompts]
        )
        rows = [json.loads(line) for line in recorded.read_text().splitlines()]
        for row in rows:
            del row["request"]["vllm_xargs"]
        recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
        capsys.readouterr()
        found = scores(server, recorded, "--budgets", "2000,40")
        whole, small = found[::2], found[1::2]
        assert [row["evicted"] for row in whole] == pytest.approx([row["full"] for row in whole])
        lost = [row["full"] - row["evicted"] for row in small]
        assert sum(lost) > 0.1 and all(lost)
        said = capsys.readouterr().out.splitlines()[-2:]
        assert said[0].startswith("2000: no ") and said[1].startswith("40: answers lose")


def test_conversations_are_scored_where_they_are_evicted(tiny_model, tmp_path):
    flags = [*BASE, *ALLOWING, "--kv-eviction-every", "128"]
    with Server(tiny_model, flags, tmp_path / "log") as server:
        given = record(server, tmp_path / "turns.jsonl", bodies())
        made = server.metric("vllm_kvevict:evictions_total")
        assert made >= len(given)
        found = scores(server, tmp_path / "turns.jsonl")
        assert server.metric("vllm_kvevict:evictions_total") >= made + len(given)
        check(found, given, "evicted")
        assert sum(row["evicted"] != row["full"] for row in found) == len(given)
