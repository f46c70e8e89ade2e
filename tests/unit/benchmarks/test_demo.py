"""The demo's questions and memory, without a server."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import demo
from benchmarks.demo import FIRST, block_bytes, draw, server_args, side_by_side, table
from benchmarks.facts import FACTS, questions
from benchmarks.repeat import COMMIT


def test_every_fact_stands_in_its_text_once_and_nowhere_else():
    asked = questions(len(FACTS), 8000)
    for index, question in enumerate(asked):
        sentence, wanted, holds = FACTS[index]
        assert question.text.count(sentence) == 1 and question.question == wanted
        assert question.right(sentence) and not question.right("I do not know.")
        assert sum(other.right(sentence) for other in asked) == 1
        assert 7900 < len(question.text) < 8800
        assert question.text.count(holds) == sentence.count(holds)
    with pytest.raises(ValueError, match="there are 1 to"):
        questions(len(FACTS) + 1, 8000)


def test_memory_for_two_full_prompts(tmp_path):
    config = dict(num_hidden_layers=30, num_key_value_heads=3, head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    token = 30 * 3 * 2 * 64 * 2
    assert block_bytes(tmp_path) == 32 * token
    args = server_args(tmp_path)
    memory = int(args[args.index("--kv-cache-memory-bytes") + 1])
    assert 2 * (2048 + 128) * token <= memory < 2 * (2048 + 128 + 64) * token


def test_a_question_may_come_later():
    (question,) = questions(1, 900)
    text, later = question.messages()
    assert question.text in text and question.question not in text and question.question in later


@pytest.mark.parametrize("evicts", [True, False])
def test_stock_vllm_is_sent_no_key_of_eviction(monkeypatch, evicts):
    """It answers HTTP 400 to mappings in ``vllm_xargs``."""
    sent = []

    def create(**request):
        sent.append(request)
        choice = SimpleNamespace(message=SimpleNamespace(content=" Yes. "))
        return SimpleNamespace(choices=[choice])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    monkeypatch.setattr(demo, "OpenAI", lambda **_: client)
    server = SimpleNamespace(url="http://127.0.0.1:1")
    told = demo.told(server, "m", questions(2, 900), evicts)
    assert told["answers"] == told["later"] == ["Yes."] * 2
    known, later = sent[:2], sent[2:]
    assert [request["extra_body"] for request in known] == [{}] * 2
    assert all(bool(request["extra_body"]) == evicts for request in later)
    assert all(len(request["messages"]) == 2 for request in later)


def rows() -> dict[str, dict]:
    told = dict(right=7, right_unknown=6, output_tokens_per_s=20.0, answers=["It is\nhere."])
    evicted = told | dict(output_tokens_per_s=30.0, answers=[""], later=["Later."], evictions=3)
    return {"stock": told, "eviction": evicted, "limit": {"output_tokens_per_s": 20.0}}


def test_answers_side_by_side():
    asked = questions(1, 900)
    text = side_by_side(asked, rows())
    assert asked[0].question in text and "stock vLLM   It is here." in text
    assert "asked later  Later." in text


def test_the_comparison(tmp_path):
    lines = table(rows()).splitlines()
    (tokens,) = [line for line in lines if "output tokens/s" in line]
    assert tokens.split()[-4:] == ["20.0", "30.0", "20.0", "1.50x"]
    (evictions,) = [line for line in lines if line.startswith("evictions")]
    assert evictions.split() == ["evictions", "-", "3", "-", "-"]
    assert lines[0].endswith("auto / stock")
    (right,) = [line for line in lines if line.startswith("right, question known")]
    assert right.split()[-4:] == ["7", "7", "-", "1.00x"]
    assert table(rows(), FIRST).splitlines() == lines[:3], "what a newcomer needs comes first"
    draw(rows(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_result_file_has_what_was_printed_and_its_commit():
    origin = dict(
        command="python -m benchmarks.demo", date="2026-11-26 05:28 UTC", commit="abcdef1",
        machine="a CPU, 2 cores", versions={"vllm": "0.32.0", "torch": "2.13.0"},
    )  # fmt: skip
    text = demo.markdown("a table\nof two lines", 379.6, origin)
    assert COMMIT.findall(text) == ["abcdef1"]
    assert text.endswith("```\na table\nof two lines\n```\n")
    assert "set up: 380 s. a CPU, 2 cores. vllm 0.32.0, torch 2.13.0.\n" in text


def test_it_shows_what_readme_begins_with():
    """README's first command and its table of throughput have the demo's policy and budget."""
    readme = (Path(demo.__file__).parents[1] / "README.md").read_text()
    (command,) = re.findall(r"^ +vllm serve MODEL .*$", readme, re.MULTILINE)
    assert f"--kv-eviction {demo.POLICY} --kv-eviction-budget {demo.BUDGET} " in command
    assert f"| `{demo.POLICY}` | {demo.BUDGET} | " in readme
    assert "**Throughput and latency.** SmolLM2 " in readme, "the demo's model"
