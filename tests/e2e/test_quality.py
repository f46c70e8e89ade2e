"""The quality benchmark in a tiny form, through real servers: the machinery, not the scores.

The model has random weights, so its answers are worth nothing and depend on every evicted token.
"""

import json
import os
from pathlib import Path

import pytest

from benchmarks.quality.__main__ import main
from benchmarks.quality.kvpress_baseline import PYTHON
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.options import Options
from benchmarks.quality.own_server import start, variants
from benchmarks.quality.prompt import AGNOSTIC, AWARE, SCENARIOS, message
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tasks import characters_for, make

pytestmark = pytest.mark.nightly

BUDGETS, TASKS, SAMPLES, LENGTH, MAX_TOKENS = ("20%", "60%"), ("s-niah", "vt"), 2, 600, 8
POLICIES = ("streaming-llm", "snapkv", "ada-snapkv")
LABELS = {
    *POLICIES,
    "snapkv, avg 5",
    "ada-snapkv, avg 5",
    *(f"kvpress {press}" for press in POLICIES),
}


@pytest.fixture(scope="module")
def arguments(tiny_model_kv4) -> list[str]:
    return [
        "--tasks", ",".join(TASKS), "--samples", str(SAMPLES), "--length", str(LENGTH),
        "--policies", ",".join(POLICIES), "--presses", ",".join(POLICIES), "--like-for-like",
        "--dtype", "float32",
        "--budgets", ",".join(BUDGETS), "--max-tokens", str(MAX_TOKENS), "--threshold", "0",
        "--concurrency", "4", "--kv-memory", "128M", "--threads", "1", "--check", "1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def own(tiny_model_kv4, arguments, tmp_path_factory) -> Path:
    """A run that starts its servers itself, with kvpress where it is installed."""
    folder = tmp_path_factory.mktemp("own")
    if not PYTHON.exists() and "CI" in os.environ:
        pytest.fail(f"{PYTHON} is missing: run `make setup-kvpress`")
    kvpress = "--kvpress" if PYTHON.exists() else "--no-kvpress"
    main(
        [*arguments, kvpress, "--model", str(tiny_model_kv4),
         "--output", str(folder / "quality.json"), "--work", str(folder)]
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def remote(tiny_model_kv4, arguments, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run against a server that is there already; and its answers to the same chats, asked
    without any setting of ours."""
    folder = tmp_path_factory.mktemp("remote")
    options = Options.parse([*arguments, "--model", str(tiny_model_kv4), "--work", str(folder)])
    with start(options, variants(options)[0], tiny_model_kv4) as server:
        main(
            [*arguments, "--base-url", server.url, "--output", str(folder / "quality.json"),
             "--work", str(folder)]
        )  # fmt: skip
        body = dict(model=str(tiny_model_kv4), max_tokens=MAX_TOKENS, temperature=0)
        body["vllm_xargs"] = {"kv_eviction": "none"}
        body |= dict(add_generation_prompt=False, continue_final_message=True)
        direct = [
            server.post("/v1/chat/completions", body | dict(messages=begun(sample)))
            for sample in samples(tiny_model_kv4)
        ]
    return folder, [answer["choices"][0]["message"]["content"] for answer in direct]


def samples(model: Path) -> list[RulerSample]:
    """The samples that the benchmark makes, in its order."""
    chat = LocalChat(model)

    def count(sample: RulerSample) -> int:
        return len(chat.tokenize(message(sample)))

    characters = {task: characters_for(task, LENGTH, count) for task in TASKS}
    return [make(task, characters[task], seed) for seed in range(SAMPLES) for task in TASKS]


def begun(sample: RulerSample) -> list[dict[str, str]]:
    """The chat of a sample with the beginning of its answer."""
    return [*message(sample), {"role": "assistant", "content": sample.prefix}]


def answers(folder: Path) -> list[dict]:
    return json.loads((folder / "answers.json").read_text())


def result(folder: Path) -> dict:
    return json.loads((folder / "quality.json").read_text())


def test_the_table_is_complete(own):
    found = result(own)
    wanted = LABELS if PYTHON.exists() else {name for name in LABELS if "kvpress" not in name}
    cells = {(c["scenario"], c["label"], c["budget"], c["task"]) for c in found["cells"]}
    tasks = (*TASKS, "average")
    assert cells >= {
        (s, label, b, t) for s in SCENARIOS for label in wanted for b in BUDGETS for t in tasks
    }
    assert {(c["n"]) for c in found["cells"] if c["task"] != "average"} == {SAMPLES}
    assert {"commit", "command", "date", "machine", "versions", "weights_sha256"} <= set(found)
    text = (own / "quality.md").read_text()
    assert all(f"| {label} |" in text for label in wanted)
    for scenario in SCENARIOS:
        assert (own / f"quality_{scenario}.png").stat().st_size > 20_000


def test_every_request_that_should_evict_did(own):
    for server, labels in (("default", 3), ("avg5", 2)):
        found = result(own)["evictions"][server]
        requests = len(SCENARIOS) * labels * len(BUDGETS) * len(TASKS) * SAMPLES
        assert found["expected"]["evictions"] == requests > 0
        assert {key: found["counted"][key] for key in found["expected"]} == found["expected"]
    assert result(own)["notes"] == []


def test_full_cache_is_a_plain_chat(remote):
    folder, direct = remote
    assert [row["answers"]["full cache"] for row in answers(folder)] == direct
    assert len(set(direct)) == len(direct)


def test_an_own_server_and_a_running_one_answer_alike(own, remote):
    for first, second in zip(answers(own), answers(remote[0]), strict=True):
        shared = {key: first["tokens"][key] for key in second["tokens"]}
        assert shared == second["tokens"]


def test_eviction_shows_in_the_answers(own):
    for row in answers(own):
        for scenario in SCENARIOS:
            kept = {label: row["answers"][f"{scenario} | {label} | 20%"] for label in POLICIES}
            assert row["answers"]["full cache"] not in kept.values()
            assert kept["snapkv"] != kept["streaming-llm"]


def test_question_aware_evicts_later_and_keeps_the_first_token(own):
    """There the first token comes from full attention; otherwise from the evicted context."""
    rows = answers(own)
    assert all(0 < row["context_tokens"] < row["prompt_tokens"] for row in rows)
    kept = {(k["scenario"], k["budget"]): k for k in result(own)["kept"]}
    for budget in BUDGETS:
        assert kept[AGNOSTIC, budget]["point"] < kept[AWARE, budget]["point"]
        assert kept[AWARE, budget]["covered"] == 0


@pytest.mark.skipif(not PYTHON.exists(), reason="kvpress is not installed: `make setup-kvpress`")
def test_transformers_answers_as_vllm_does(own):
    """Full cache, and StreamingLLM, which keeps the same tokens in both whatever the block."""
    found = result(own)
    assert found["full_cache_answers_equal_to_transformers"] == 1
    assert found["versions"]["kvpress environment: kvpress"] == "0.5.5"
    same = [
        row["tokens"][f"{scenario} | streaming-llm | {budget}"]
        == row["tokens"][f"{scenario} | kvpress streaming-llm | {budget}"]
        for row in answers(own)
        for scenario in SCENARIOS
        for budget in BUDGETS
    ]
    assert all(same), f"{sum(same)} of {len(same)}"
