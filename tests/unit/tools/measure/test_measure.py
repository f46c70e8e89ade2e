"""``vllm-kvevict measure`` against a pretended server: what it asks, counts and prints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.http_stand_in import JsonHandler, served
from vllm_kvevict.tools.measure.__main__ import main
from vllm_kvevict.tools.measure.questions import read
from vllm_kvevict.tools.measure.table import advice, wilson

NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)
"""vLLM's words."""


class Handler(JsonHandler):
    """Repeats the part of the context that it "kept": its last tenth if the question was not known
    at a budget of 10%."""

    seen: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[set[str | None]] = set()
    has_template: ClassVar[bool] = True

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = self.body()
        chats = self.path == "/v1/chat/completions"
        if chats and not self.has_template:
            return self.reply(400, {"error": {"message": NO_TEMPLATE}})
        self.seen.append(body)
        self.keys.add(self.headers["Authorization"])
        settings = body["vllm_xargs"]
        context = body["messages"][0]["content"] if chats else body["prompt"]
        if settings.get("kv_eviction") == "tova":
            return self.reply(400, {"error": {"message": "kv_eviction must be one of snapkv"}})
        if "kv_eviction_at" in settings:
            place = context.rindex(settings["kv_eviction_at"]["text"])
            if settings["kv_eviction_budget"] == "10%":
                context = context[place - place // 10 : place]
        answer = {"message": {"content": context}} if chats else {"text": context}
        return self.reply(200, {"choices": [answer]})


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen, Handler.keys, Handler.has_template = [], set(), True
    with served(Handler) as address:
        yield address


ROWS: list[dict[str, Any]] = [
    dict(context="The code is 4711. " + "x" * 400, question="Which code?", answer="4711"),
    dict(context="y" * 400 + " Blue and RED.", question="Which?", answer=["red", "blue"]),
    dict(context="z" * 400 + "blue", question="Which?", answer=["red", "blue"], task="qa_1",
         answer_prefix="It is", max_new_tokens=5),
    dict(context="y" * 400, question="Which?", answer="green"),
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_what_is_asked_and_printed(url: str, file: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = file.parent / "answers.jsonl"
    words = [str(file), "--base-url", url + "/v1/", "--budgets", "10%, 256", "--output", str(out)]
    assert main(words) == 0
    *printed, said = capsys.readouterr().out.splitlines()
    assert said == (
        "Take --kv-eviction-budget 256: it loses at most 0% of the questions on balance (a hint: "
        "4 questions are few)."
    )
    rows = [line.split("  ") for line in printed]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[0] == ["kept", "question", "right", "95%", "lost", "gained"]
    assert rows[1] == ["full cache", "3 of 4", "[30, 95]", "0", "0"]
    assert rows[2] == ["10%", "known", "3 of 4", "[30, 95]", "0", "0"]
    assert rows[3] == ["10%", "not known", "2 of 4", "[15, 85]", "1", "0"]
    assert [row[:3] for row in rows[4:]] == [
        ["256", "known", "3 of 4"], ["256", "not known", "3 of 4"],
    ]  # fmt: skip
    assert len(Handler.seen) == 20 and Handler.keys == {"Bearer secret"}
    bodies = [body for body in Handler.seen if body["max_tokens"] == 5]
    assert len(bodies) == 5 and all(body["model"] == "served" for body in bodies)
    first = bodies[0]
    assert first["vllm_xargs"] == {"kv_eviction": "none"} and first["temperature"] == 0
    assert first["continue_final_message"] and not first["add_generation_prompt"]
    assert first["messages"][1] == {"role": "assistant", "content": "It is"}
    assert [body["vllm_xargs"] for body in bodies[1:3]] == [
        {"kv_eviction_budget": "10%", "kv_eviction_interval": 0, "kv_eviction_when": "always"},
        {
            "kv_eviction_budget": "10%", "kv_eviction_interval": 0, "kv_eviction_when": "always",
            "kv_eviction_at": {"text": "\n\nWhich?"},
        },
    ]  # fmt: skip
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 20 and written[0]["budget"] == "full cache"
    assert [row["index"] for row in written[:4]] == [0, 1, 2, 3]
    assert "4711" in written[0]["answer"]


def test_a_base_model_completes_texts(url: str, file: Path, capsys: Any) -> None:
    Handler.has_template = False
    assert main([str(file), "--base-url", url, "--budgets", "10%"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [row[-5] for row in rows[1:]] == ["4", "4", "4"] and rows[3][:3] == [
        "10%",
        "not",
        "known",
    ]
    assert [row[row.index("of") - 1] for row in rows[1:]] == ["3", "3", "2"], "as in chats"
    assert len(Handler.seen) == 12
    last = [body for body in Handler.seen if body["max_tokens"] == 5][-1]
    assert last["prompt"] == "z" * 400 + "blue\n\nWhich?\nIt is" and "messages" not in last
    assert last["vllm_xargs"]["kv_eviction_at"] == {"text": "\n\nWhich?"}


@pytest.mark.parametrize(
    "lost, says",
    [
        ({"50%": 0, "25%": 2, "12.5%": 9}, "Take --kv-eviction-budget 25%: it loses at most 5% "),
        ({"50%": 0, "25%": 0, "12.5%": 0}, "Take --kv-eviction-budget 12.5%: it loses at most 0% "),
        ({"50%": 9, "25%": 9, "12.5%": 9}, "Take none of these budgets: each loses more than 5%"),
    ],
)
def test_the_advice_is_the_smallest_budget_that_loses_little(lost: dict, says: str) -> None:
    """The worse of known and not known counts, of 40 questions."""
    full = [True] * 40
    rows = [("full cache", "", full, full)]
    for budget, count in lost.items():
        rows += [
            (budget, "known", full, full),
            (budget, "not known", [False] * count + [True] * (40 - count), full),
        ]
    assert advice(rows).startswith(says) and "a hint" not in advice(rows)
    assert "answers none" in advice([("full cache", "", [False] * 9, [False] * 9), *rows[1:]])


def test_the_examples_are_questions_whose_answers_stand_in_the_text() -> None:
    found = read(Path(__file__).parents[4] / "examples" / "questions.jsonl")
    assert len(found) == 8 and len({one.question for one in found}) == 8
    assert all(one.is_right(one.context) and not one.is_right(one.question) for one in found)
    assert all(5000 < len(one.context) < 9000 for one in found)


@pytest.mark.parametrize("right, count", [(0, 5), (5, 5), (31, 100), (98, 100)])
def test_intervals_are_wilsons(right: int, count: int) -> None:
    """The shares from which the observed one is 1.96 standard deviations away, or less."""
    shares = [at / 20_000 for at in range(20_001)]
    inside = [
        share
        for share in shares
        if abs(right / count - share) <= 1.96 * (share * (1 - share) / count) ** 0.5 + 1e-12
    ]
    assert wilson(right, count) == pytest.approx((inside[0], inside[-1]), abs=2e-4)


@pytest.mark.parametrize(
    "line, says",
    [
        ("{]", "line 2 is not JSON: Expecting"),
        ('["a"]', "line 2: a line must be a JSON object"),
        ('{"context": "a"}', "line 2: question, answer must be given"),
        ('{"context": "a", "question": "b", "answer": []}', "answer must be a text or a list"),
        ('{"context": " ", "question": "b", "answer": "c"}', "context must be a text"),
        (
            '{"context": "a", "question": "b", "answer": "c", "max_new_tokens": 0}',
            "max_new_tokens must be a whole number",
        ),
    ],
)
def test_what_is_no_question_is_named(file: Path, line: str, says: str) -> None:
    file.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(ValueError, match=says):
        read(file)


def test_refusals_are_one_sentence(url: str, file: Path, capsys: Any) -> None:
    def complaint(*words: str) -> str:
        assert main([*words]) == 1
        line: str = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ")
        return line

    words = str(file), "--base-url", url
    assert "HTTP 400: kv_eviction must be one of snapkv" in complaint(*words, "--policy", "tova")
    assert "does not answer" in complaint(str(file), "--base-url", "http://127.0.0.1:1")
    assert "No such file" in complaint("none.jsonl", "--base-url", url)
    assert "give tokens" in complaint(*words, "--budgets", "half")
    file.write_text("")
    assert "has no questions" in complaint(*words)
