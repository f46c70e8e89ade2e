"""The demo's questions and memory, without a server."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import demo
from benchmarks.demo import block_bytes, server_args
from benchmarks.facts import FACTS, ORDER, questions
from benchmarks.repeat import COMMIT


def test_every_fact_stands_in_its_text_once_and_nowhere_else():
    asked = questions(len(FACTS), 8000)
    assert sorted(ORDER) == [*range(len(FACTS))]
    for index, question in zip(ORDER, asked, strict=True):
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
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        token = 30 * 3 * 2 * 64 * size
        assert block_bytes(tmp_path, dtype) == 32 * token
        args = server_args(tmp_path, dtype)
        assert args[args.index("--dtype") + 1] == dtype
        memory = int(args[args.index("--kv-cache-memory-bytes") + 1])
        assert 2 * (2048 + 128) * token <= memory < 2 * (2048 + 128 + 64) * token


def test_a_question_may_come_later():
    (question,) = questions(1, 900)
    text, later = question.messages()
    assert question.text in text and question.question not in text and question.question in later


def test_a_text_that_repeats_itself_is_no_right_answer():
    (question,) = (one for one in questions(3, 900) if one.holds == "Iceland")
    loop = "The story about Iceland is a slice of a larger story. " + (
        "The story is a slice of a larger story that is a slice of a larger story that is a slice "
        "of a larger story."
    )
    assert question.right(loop) and demo.is_loop(loop) and not demo.is_right(question, loop)
    said = "Professor Okafor begins her lectures on volcanoes with a story about Iceland."
    assert demo.is_right(question, said) and not demo.is_right(question, "Of Norway.")
    assert not any(demo.is_loop(fact) for fact, *_ in FACTS)


def test_the_load_is_what_this_machine_has_time_for():
    """The largest that fits, and at least one that shows how many sequences run at once."""
    sizes = [demo.size_for(seconds) for seconds in (0.1, 3.0, 4.0, 4.6, 60.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == (6, 8) and sizes[-1] == (2, 4)
    assert len(set(sizes)) == len(demo.SIZES)
    for seconds, size in zip((0.1, 3.0, 4.0), sizes, strict=False):
        assert seconds * demo.work(*size) <= demo.TARGET_S
    assert demo.work(2, 4) == 3 + 36 + 16


def test_conversations_are_about_texts_of_their_own():
    """KV memory holds two of them, and each is as long as the last."""
    found = demo.dialogues()
    assert len({one.document for one in found}) == demo.CHATS == 6
    assert all(len(one.questions) == demo.TURNS == 4 for one in found)
    characters = 4.4 * demo.BLOCK * (demo.blocks(2) - 1)
    assert sum(len(one.document) for one in found[:2]) < characters
    assert sum(len(one.document) for one in found[:3]) > characters


class Pretended:
    """A server that answers everything with one text, and counts what was asked."""

    def __init__(self, label: str) -> None:
        self.label, self.model, self.url = label, "m", "http://127.0.0.1:1"
        self.asked: list[dict] = []
        self.warm, self.evicted = 0, 0

    def warm_up(self) -> None:
        self.warm += 1

    def evictions(self) -> dict[str, int]:
        return {"evictions": self.evicted}


@pytest.mark.parametrize("evicting", [True, False])
def test_the_parts_in_their_order(monkeypatch, tmp_path, capsys, evicting):
    """Stock vLLM is sent no key of eviction, each server is warm before it is counted, and a part
    in which nothing was evicted is a defect."""
    servers = {label: Pretended(label) for label in demo.NAMES}
    order: list[str] = []

    def answer(server, question, xargs):
        server.asked.append(xargs)
        server.evicted += evicting
        return "It is under the flower pot.", 2.0

    def load(server, model, load):
        order.append(server.label)
        server.evicted += evicting * load.num_prompts
        assert ("--extra-body" in load.args()) == (server.label == "eviction")
        return dict(
            completed=load.num_prompts, peak_running=2, output_tokens_per_s=9.0, ttft_ms_median=1.0,
            tpot_ms_median=1.0, preemptions=0,
        )  # fmt: skip

    def converse(self, server, label):
        order.append(f"{label} chats")
        server.evicted += evicting * demo.CHATS
        return [1.0, 2.0, 3.0, 4.0] if label == "stock" else [2.0, 1.0, 1.0, 1.0]

    def page(self, asked):
        order.append("page")
        return tmp_path / "kept.html"

    monkeypatch.setattr(demo, "start", lambda *_: servers)
    monkeypatch.setattr(demo, "answer", answer)
    monkeypatch.setattr(demo, "measure", load)
    monkeypatch.setattr(demo, "block_bytes", lambda *_: 1)
    monkeypatch.setattr(demo.Demo, "_page", page)
    monkeypatch.setattr(demo.Demo, "_converse", converse)
    found = demo.Demo(tmp_path, "float32", ["--kv-eviction", "auto"], (3, 5)).run()
    assert order == ["page", "stock chats", "eviction chats", "stock", "eviction"]
    assert [one.warm for one in servers.values()] == [1, 1]
    assert servers["stock"].asked == [{}, {}]
    ways = [demo.WHOLE, demo.AT_TEXT]
    assert servers["eviction"].asked == [demo.WHOLE] * 2 + ways * 3
    assert found["right"] == {"full": 1, "evicted": 1}
    assert found["evicted_all"] is evicting
    printed = capsys.readouterr().out
    assert printed.index("right: 1 of 3") < printed.index("median TTFT") < printed.index("Load: 5")
    assert re.findall(r"^ratio(.*)$", printed, re.MULTILINE)[0].split() == [
        "2.00x", "0.50x", "0.33x", "0.25x",
    ]  # fmt: skip
    demo.draw(found, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = demo.summary(found)
    assert "  full     It is under the flower pot. (right)" in text and "Load: 5 prompts" in text


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
    assert "\nSmolLM2-135M with its profile, " in readme, "the demo's model"
