"""``vllm-kvevict measure --recorded`` against a pretended server: what it sends, and arithmetic."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.http_stand_in import JsonHandler, served
from vllm_kvevict.tools.measure.__main__ import main
from vllm_kvevict.tools.measure.loss import by_group, length_class, loss_of
from vllm_kvevict.tools.measure.recorded import read
from vllm_kvevict.tools.measure.score import Score

WORDS = 40
"""Words of the long prompt: one token each."""


def ids(text: str) -> list[int]:
    """Tokens of a text: its words' lengths, and where they stand in the alphabet."""
    return [100 * len(word) + ord(word[0]) for word in text.split()]


def rendered(messages: list[dict[str, Any]], generation: bool = True) -> list[int]:
    """Tokens of a chat: each message opens with 1, and closes with 2; an answer opens with 3."""
    found = [one for message in messages for one in (1, *ids(message["content"]), 2)]
    return [*found, 3] if generation else found


def lost(token: int, adapter: bool) -> float:
    """Nats that the pretended server loses of a token after its eviction point."""
    return (2 if adapter else 1) * (token % 5) / 10


class Handler(JsonHandler):
    """Has each token at -0.5 nats, less what is lost from the token after the eviction point on."""

    seen: ClassVar[list[dict[str, Any]]] = []
    allows: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    every: ClassVar[int] = 0
    pushed: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self.reply(200, f'vllm_kvevict:config_info{{engine="0",every="{self.every}"}} 1')
        return self.reply(200, {"data": [{"id": "served"}]})

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        self.pushed.append((self.path, self.rfile.read(length).decode()))
        self.reply(200, "")

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/tokenize":
            chat = body.get("messages")
            generation = body.get("add_generation_prompt", True)
            tokens = rendered(chat, generation) if chat else ids(body["prompt"])
            return self.reply(200, {"tokens": tokens})
        settings = body["vllm_xargs"]
        if self.evicts and settings.get("kv_eviction") == "no-such-policy":
            return self.refuse("KV eviction: kv_eviction must be one of the policies")
        if not self.allows and settings.get("kv_eviction") == "none":
            return self.refuse("KV eviction: kv_eviction must be one of the policies (ada-snapkv)")
        if body["max_tokens"] == 1 and len(body["prompt"]) > 100:
            return self.refuse("This model's maximum context length is 100 tokens")
        self.seen.append(body)
        tokens = body["prompt"]
        whole = settings.get("kv_eviction") == "none"
        point = len(tokens) if whole else settings.get("kv_eviction_at", self.every)
        entries: list[Any] = [None]
        for place, token in enumerate(tokens[1:], 1):
            less = lost(token, body["model"] == "adapter") if place > point else 0.0
            entry = {"logprob": -0.5 - less, "rank": 1 if less < 0.3 else 2}
            entries.append({str(token): entry})
        return self.reply(200, {"choices": [{"text": "x", "prompt_logprobs": entries}]})

    def refuse(self, message: str) -> None:
        self.reply(400, {"error": {"message": message}})


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen, Handler.pushed = [], []
    Handler.allows = Handler.evicts = True
    Handler.every = 0
    with served(Handler) as address:
        yield address


LONG = " ".join(f"{'abcdefghij'[at % 10]}{'x' * (at % 4)}" for at in range(WORDS))
ANSWER = "one eleven crates of apples"
CHAT = [{"role": "user", "content": LONG}]
TURNS = [*CHAT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why so"}]


def chosen(**choice: Any) -> dict[str, Any]:
    return {"choices": [choice]}


ROWS: list[dict[str, Any]] = [
    dict(request=dict(model="served", prompt=LONG), response=chosen(text=ANSWER)),
    dict(request=dict(model="served", messages=CHAT), response=chosen(message={"content": ANSWER})),
    dict(
        request=dict(model="adapter", messages=TURNS), response=chosen(message={"content": ANSWER})
    ),
    dict(
        request=dict(
            model="served", messages=TURNS, tools=[{"type": "function"}],
            vllm_xargs={"kv_eviction_at": {"message": 0}, "kv_eviction_budget": "50%", "mine": 1},
        ),
        response=chosen(message={"content": None}, token_ids=[11, 12, 13]),
        kind="support",
    ),
    dict(
        request=dict(prompt=[7] * 20, vllm_xargs={"kv_eviction_at": -5}),
        response=chosen(text="", token_ids=[14, 19, 9]),
    ),
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def expected() -> list[float]:
    """Loss of each row in nats per token, from its tokens. The one after the point is computed from
    the full cache."""
    answer = ids(ANSWER)
    behind = [token % 5 / 10 for token in answer[1:]]
    return [
        sum(behind) / len(answer),
        sum(behind) / len(answer),
        2 * sum(behind) / len(answer),
        (0.1 + 0.2 + 0.3) / 3,
        (0.4 + 0.4 + 0.4) / 3,
    ]


def test_losses_are_those_of_the_tokens_after_the_eviction(
    url: str, file: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = file.parent / "scores.jsonl"
    assert main(["--recorded", str(file), "--base-url", url, "--output", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(row["full"] - row["evicted"]) / row["tokens"] for row in rows]
    assert found == pytest.approx(expected()) and all(loss > 0 for loss in found)
    assert [row["kind"] for row in rows] == [
        "completion", "chat", "conversation", "support", "completion",
    ]  # fmt: skip
    assert [row["first"] for row in rows] == [5, 5, 5, 3, 3]
    still = [sum(token % 5 < 3 or not at for at, token in enumerate(ids(ANSWER)))] * 2
    assert [row["still_first"] for row in rows[:2]] == still
    assert [row["still_first"] for row in rows[3:]] == [2, 0]
    printed = capsys.readouterr().out.splitlines()
    assert f"{statistics.mean(expected()):.4f}" in printed[1] and " 5 " in printed[1]
    for kind in ("chat", "completion", "conversation", "support"):
        assert sum(f" {kind} " in line for line in printed) == 1
    assert printed[-1].startswith("the server's budget: answers lose 0.")


def test_what_is_sent(url: str, file: Path) -> None:
    """The context is evicted where it would have been; the request's own settings are kept."""
    words = ["--recorded", str(file), "--base-url", url, "--budgets", "12.5%", "--concurrency", "1"]
    assert main(words) == 0
    (_, *sent) = Handler.seen
    assert len(sent) == 2 * len(ROWS) and all(body["prompt_logprobs"] == 0 for body in sent)
    assert [body["vllm_xargs"] for body in sent[::2]] == [{"kv_eviction": "none"}] * len(ROWS)
    settings = [body["vllm_xargs"] for body in sent[1::2]]
    chat, turns = len(rendered(CHAT)), len(rendered(TURNS))
    asked = dict(kv_eviction_budget="12.5%", kv_eviction_when="always")
    assert settings == [
        {**asked, "kv_eviction_at": WORDS},
        {**asked, "kv_eviction_at": chat},
        {**asked, "kv_eviction_at": turns},
        {**asked, "kv_eviction_at": len(rendered(CHAT, False))},
        {**asked, "kv_eviction_at": 15},
    ]
    assert [body["model"] for body in sent[1::2]] == [
        "served", "served", "adapter", "served", "served",
    ]  # fmt: skip
    assert sent[3]["prompt"] == [*rendered(CHAT), *ids(ANSWER)]
    assert sent[9]["prompt"] == [*[7] * 20, 14, 19, 9]


def test_conversations_are_evicted_at_positions_of_their_own(url: str, file: Path) -> None:
    """A server with --kv-eviction-every evicts by length alone, so no point is sent."""
    Handler.every = 32
    assert main(["--recorded", str(file), "--base-url", url, "--concurrency", "1"]) == 0
    settings = [body["vllm_xargs"] for body in Handler.seen[2::2]]
    assert settings[:3] == [{"kv_eviction_when": "always"}] * 3
    assert "kv_eviction_at" in settings[3] and "kv_eviction_at" in settings[4]


def test_token_ids_of_a_chats_response_need_no_tokenizer(tmp_path: Path, url: str) -> None:
    row = dict(
        request=dict(messages=CHAT),
        response=dict(chosen(message={"content": "x"}, token_ids=[5]), prompt_token_ids=[8, 8, 8]),
    )
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row))
    assert main(["--recorded", str(path), "--base-url", url]) == 0
    assert Handler.seen[-1]["prompt"] == [8, 8, 8, 5]
    assert Handler.seen[-1]["vllm_xargs"]["kv_eviction_at"] == 3


@pytest.mark.parametrize(
    "line, says",
    [
        ("{]", "line 2 is not JSON"),
        ('"a"', "line 2: a line must be a JSON object"),
        ('{"request": {"model": "a"}}', "line 2: request must be the body of a completion"),
        ('{"request": {"prompt": "a"}}', "line 2: the answer is missing: response must be"),
        (
            '{"request": {"prompt": "a"}, "response": {"choices": [{"text": ""}]}}',
            "line 2: the answer is missing: the first of choices",
        ),
        (
            '{"request": {"prompt": ["a"]}, "response": {"choices": [{"text": "b"}]}}',
            "line 2: prompt must be one text",
        ),
        (
            '{"request": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, '
            '"response": {"choices": [{"message": {"content": "b"}}]}}',
            "line 2: requests with images or sounds cannot be scored",
        ),
        (
            '{"request": {"messages": [{"role": "user", "content": "a"}]}, "response": {"choices": '
            '[{"message": {"content": "b", "tool_calls": [{}]}}]}}',
            "return_token_ids",
        ),
    ],
)
def test_a_broken_line_is_named_with_its_file(file: Path, line: str, says: str) -> None:
    file.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(ValueError, match=says) as raised:
        read(file)
    assert str(raised.value).startswith(f"--recorded: {file}, line 2")


def test_refusals_are_one_sentence(url: str, file: Path, capsys: Any) -> None:
    words = ["--recorded", str(file), "--base-url", url]

    def complaint(*more: str) -> str:
        assert main([*words, *more]) == 1
        line: str = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ")
        return line

    Handler.allows = False
    assert "start the server with --kv-eviction-allow none" in complaint()
    Handler.allows, Handler.evicts = True, False
    assert "without vllm-kvevict, without --kv-eviction" in complaint()
    Handler.evicts = True
    assert "--policy cannot be combined with --recorded" in complaint("--policy", "tova")
    assert "must end in .prom" in complaint("--textfile", "loss.txt")
    assert "give a file of QUESTIONS, or --recorded" in complaint("questions.jsonl")
    file.write_text("")
    assert "has no requests" in complaint()
    file.write_text(json.dumps(dict(request=dict(prompt=[1] * 99), response=chosen(text="a b"))))
    assert "no request could be scored; line 1: " in complaint()


def test_requests_that_the_server_refuses_are_counted(url: str, file: Path, capsys: Any) -> None:
    long = dict(request=dict(prompt=[1] * 99), response=chosen(text="a b"))
    with file.open("a") as out:
        out.write(json.dumps(long) + "\n")
    assert main(["--recorded", str(file), "--base-url", url]) == 0
    found = capsys.readouterr()
    assert "1 of 6 requests were left out; line 7: " in found.err
    assert "maximum context length" in found.err


def score(loss: float, prompt: int = 10, kind: str = "chat") -> Score:
    return Score(1, kind, prompt, 4, 0.0, -4 * loss, 4, 4)


def test_the_interval_covers_what_it_should() -> None:
    """Of many draws from a known distribution, about 95% of the intervals hold its mean."""
    import random

    rng, inside, wide = random.Random(5), 0, 0.0
    for _ in range(60):
        drawn = [score(rng.gauss(0.2, 0.1)) for _ in range(40)]
        found = loss_of("all", drawn)
        inside += found.low <= 0.2 <= found.high
        wide += found.high - found.low
    assert inside >= 52
    assert wide / 60 == pytest.approx(2 * 1.96 * 0.1 / 40**0.5, rel=0.1)


def test_groups() -> None:
    scores = [score(0.1, 900), score(0.3, 1024, "tools"), score(0.5, 5000)]
    groups = {one.group: one.mean for one in by_group(scores)}
    assert groups == pytest.approx(
        {
            "all": 0.3, "prompt below 1,024 tokens": 0.1, "prompt below 4,096 tokens": 0.3,
            "prompt below 16,384 tokens": 0.5, "chat": 0.3, "tools": 0.3,
        }
    )  # fmt: skip
    assert length_class(65536) == "prompt of 65,536 tokens or more"
    assert loss_of("all", scores).low != loss_of("all", scores).low, "three are too few"


def test_the_loss_is_pushed_and_written(url: str, file: Path, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    written = tmp_path / "loss.prom"
    words = ["--recorded", str(file), "--base-url", url, "--push", url, "--textfile", str(written)]
    assert main(words) == 0
    ((path, body),) = Handler.pushed
    assert path == "/metrics/job/vllm_kvevict_measure/model/served"
    for text in (body, written.read_text()):
        samples = {
            (sample.name, sample.labels.get("requests")): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        mean = samples["vllm_kvevict:measured_loss_nats", "all"]
        assert mean.value == pytest.approx(statistics.mean(expected()))
        assert mean.labels["model_name"] == "served" and mean.labels["budget"]
        low = samples["vllm_kvevict:measured_loss_low_nats", "all"].value
        high = samples["vllm_kvevict:measured_loss_high_nats", "all"].value
        assert low < mean.value < high
        assert samples["vllm_kvevict:measured_requests", "all"].value == len(ROWS)
        assert samples["vllm_kvevict:measured_timestamp_seconds", None].value > 1.7e9
