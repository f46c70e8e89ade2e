"""kvpress's rows through a pretended server: what it is sent, and what comes out."""

import json
from typing import ClassVar

import pytest

from benchmarks.quality.rows import main
from tests.http_stand_in import JsonHandler, served

TEMPLATE = "<user>{}<assistant>"


class Handler(JsonHandler):
    """Tokens are code points. It answers with its own evicted context's last letters."""

    seen: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/tokenize":
            text = body.get("prompt") or TEMPLATE.format(body["messages"][0]["content"])
            return self.reply(200, {"tokens": [ord(c) for c in text]})
        xargs = body["vllm_xargs"]
        if xargs["kv_eviction"] == "no-such-policy":
            return self.reply(400, {"error": "unknown"})
        self.seen.append(body)
        prompt = "".join(map(chr, body["prompt"]))
        text = prompt[: xargs.get("kv_eviction_at", len(prompt))][-7:]
        return self.reply(200, {"choices": [{"text": text, "token_ids": [1]}]})


@pytest.fixture
def url():
    Handler.seen = []
    with served(Handler) as address:
        yield address


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    dict(context="It is 4711.\n", question="What is it?", answer_prefix="It is", answer=["4711"],
         max_new_tokens=9, task="niah_single_1", index=0),
    dict(context="Red or blue?\n", question="Which?", answer_prefix="", answer=["red", "blue"],
         max_new_tokens=5, task="qa_1", index=1),
]  # fmt: skip


def test_rows_in_predictions_out(url, tmp_path):
    rows, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    scores = main([str(rows), str(out), "--base-url", url, "--budget", "30%"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "predicted_answer"} for row in found] == ROWS
    assert [row["predicted_answer"] for row in found] == [" 4711.\n", " blue?\n"]
    assert scores == {"niah_single_1": 1.0, "qa_1": 1.0}
    first, second = sorted(Handler.seen, key=lambda body: body["max_tokens"], reverse=True)
    assert "".join(map(chr, first["prompt"])) == TEMPLATE.format("It is 4711.\nWhat is it?") + (
        "It is"
    )
    assert first["vllm_xargs"] == {
        "kv_eviction": "ada-snapkv", "kv_eviction_budget": "30%", "kv_eviction_interval": 0,
        "kv_eviction_when": "always", "kv_eviction_at": len("<user>It is 4711.\n"),
    }  # fmt: skip
    assert (first["max_tokens"], second["max_tokens"]) == (9, 5)


def test_question_aware_and_full_cache(url, tmp_path):
    rows, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    main([str(rows), str(out), "--base-url", url, "--question-aware"])
    assert not any("kv_eviction_at" in body["vllm_xargs"] for body in Handler.seen)
    Handler.seen.clear()
    main([str(rows), str(out), "--base-url", url, "--policy", "none"])
    assert {tuple(body["vllm_xargs"].items()) for body in Handler.seen} == {
        (("kv_eviction", "none"),)
    }
