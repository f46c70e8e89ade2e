"""The demo's questions and memory, without a server."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import demo
from benchmarks.demo import FIRST, block_bytes, draw, server_args, side_by_side, table
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
    done = []
    told = demo.told(server, "m", questions(2, 900), evicts, lambda: done.append(1))
    assert told["answers"] == told["later"] == ["Yes."] * 2
    assert len(done) == 4 and told["questions"] == 2
    known, later = sent[:2], sent[2:]
    assert [request["extra_body"] for request in known] == [{}] * 2
    assert all(bool(request["extra_body"]) == evicts for request in later)
    assert all(len(request["messages"]) == 2 for request in later)


def test_the_load_is_what_this_machine_has_time_for():
    """The largest that fits, and at least one that shows how many sequences run at once."""
    sizes = [demo.size_for(seconds, 4) for seconds in (0.1, 3.0, 4.0, 5.0, 7.0, 60.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == (6, 8) and sizes[-1] == (2, 4)
    for seconds, (count, requests) in ((3.0, sizes[1]), (4.0, sizes[2]), (5.0, sizes[3])):
        # Each question goes to three servers in two ways, each request to four servers.
        assert seconds * (6 * count + 4 * 2 * requests) <= demo.TARGET_S
    assert demo.size_for(5.0, 3) > demo.size_for(5.0, 4), "there is more time for fewer servers"


def test_the_bar_is_full_when_everything_was_done(monkeypatch, tmp_path):
    """A request of the load counts when the server has finished it."""
    bars = []

    class Bar(demo.tqdm):
        def close(self):
            bars.append((self.n, self.total))
            super().close()

    def measured(server, model, load, finished):
        finished(load.num_prompts - 1)
        finished(1)
        return {"completed": load.num_prompts}

    server = SimpleNamespace(evictions=lambda: {"evictions": 9}, warm_up=lambda: None)
    monkeypatch.setattr(demo, "tqdm", Bar)
    monkeypatch.setattr(demo, "start", lambda arguments, *_: dict.fromkeys(arguments, server))
    monkeypatch.setattr(demo, "measure", measured)
    monkeypatch.setattr(demo, "answer", lambda *_, **__: "under the flower pot")
    monkeypatch.setattr(demo, "block_bytes", lambda *_: 1)
    evicts = ["--kv-eviction", "auto"]
    _, found = demo.Demo(tmp_path, "float32", evicts, (None, 5)).run()
    _, fewer = demo.Demo(tmp_path, "float32", evicts, (None, 5), limit=False).run()
    assert [*fewer, "limit"] == [*found]
    # Each of six questions goes to three servers in two ways, and each of five requests to all.
    assert list(dict.fromkeys(bars)) == [(36 + 4 * 10,) * 2, (36 + 3 * 10,) * 2]
    assert [found[label].get("questions") for label in demo.NAMES] == [6, 6, 6, None]
    assert found["stock"]["right"] == 1 and found["limit"]["completed"] == 5


def rows() -> dict[str, dict]:
    told = dict(
        right=7,
        right_unknown=6,
        questions=8,
        completed=4,
        output_tokens_per_s=20.0,
        answers=["It is\nhere."],
    )
    evicted = told | dict(output_tokens_per_s=30.0, answers=[""], later=["Later."], evictions=3)
    bits = evicted | dict(output_tokens_per_s=35.0, answers=["Here."], later=["There."])
    return {
        "stock": told,
        "eviction": evicted,
        "few_bits": bits,
        "limit": {"output_tokens_per_s": 20.0},
    }


def test_answers_side_by_side():
    asked = questions(1, 900)
    text = side_by_side(asked, rows())
    assert asked[0].question in text and "stock vLLM   It is here." in text
    assert "asked later  Later." in text
    assert "int4         Here." in text and "int4, later  There." in text


def test_the_comparison(tmp_path):
    lines = table(rows()).splitlines()
    (tokens,) = [line for line in lines if "output tokens/s" in line]
    assert tokens.split()[-5:] == ["20.0", "30.0", "35.0", "20.0", "1.50x"]
    (evictions,) = [line for line in lines if line.startswith("evictions")]
    assert evictions.split() == ["evictions", "-", "3", "3", "-", "-"]
    assert lines[0].endswith("auto / stock")
    (right,) = [line for line in lines if line.startswith("right, question known")]
    assert right.split()[-5:] == ["7", "7", "7", "-", "1.00x"]
    (asked,) = [line for line in lines if line.startswith("questions")]
    (load,) = [line for line in lines if line.startswith("requests")]
    assert asked.split()[1:] == ["8", "8", "8", "-", "1.00x"]
    assert load.split()[1:4] == ["4", "4", "4"]
    assert table(rows(), FIRST).splitlines() == lines[:3], "what a newcomer needs comes first"
    without = rows()
    del without["limit"]
    tokens = next(line for line in table(without).splitlines() if "output tokens/s" in line)
    assert tokens.split()[-4:] == ["20.0", "30.0", "35.0", "1.50x"]
    draw(without, tmp_path / "demo.png")
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
