"""``vllm-kvevict inspect`` against the recorder of the token oracle."""

import base64
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.models import random_text
from tests.nightly import nightly
from tests.oracles.engine import Recorder, layers_by_depth, set_aside
from tests.oracles.masked import Life, MaskedModel, check_tokens

ROOT = Path(__file__).parents[2]
NEEDLE = "The magic number is 48213."
TEXT = f"{random_text(420, seed=7)} {NEEDLE} {random_text(420, seed=8)}"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its own process; gone again for the tests behind this one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="module", autouse=True)
def without_former_engines() -> None:
    set_aside()


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """The oracle's recorder beside inspect's own, in this process."""
    from vllm_kvevict.worker.eviction import WorkerEviction

    recorder, lives = Recorder({}), []
    set_up = WorkerEviction.__init__

    def listening(self: WorkerEviction, *args: Any, **kwargs: Any) -> None:
        set_up(self, *args, **kwargs)
        recorder.layers = layers_by_depth(self.states)

        def listen(record: Any) -> None:
            request = record.eviction.request_id
            if request not in recorder.lives:
                recorder.admitted(request, record.eviction.num_tokens)
                lives.append(request)
            recorder(record)

        self.listeners.append(listen)

    monkeypatch.setattr(WorkerEviction, "__init__", listening)
    yield recorder
    assert len(lives) == 1, "inspect evicted nothing, or more than one request"


def inspect(model: Path, prompt_file: Path, *arguments: object) -> tuple[dict[str, Any], Path]:
    """Run in this process; returns the JSON and the picture."""
    from vllm_kvevict.tools.inspect.__main__ import main

    picture, data = prompt_file.with_name("kept.png"), prompt_file.with_name("kept.json")
    status = main(
        [
            str(model), "--prompt-file", str(prompt_file), "--output", str(picture),
            "--json", str(data), "--dtype", "float32", "--block-size", "32",
            # A random model has nothing to measure.
            "--kv-eviction-profile", "none", *map(str, arguments),
        ]
    )  # fmt: skip
    assert status == 0
    return json.loads(data.read_text()), picture


def positions(data: dict[str, Any]) -> list[list[list[int]]]:
    return [
        [[p for start, stop in head["kept"] for p in range(start, stop)] for head in layer["heads"]]
        for layer in data["layers"]
    ]


def tokens_of(model: Path, text: str = TEXT) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(text)["input_ids"]


@pytest.mark.parametrize(
    ("policy", "after"),
    [nightly("ada-snapkv", "prefill"), ("ada-snapkv", "decode"), ("streaming-llm", "prefill")],
)
def test_the_json_is_what_the_recorder_saw(
    tiny_model_kv4, prompt_file, monkeypatch, capsys, policy, after
) -> None:
    budget = ["--kv-eviction", policy, "--kv-eviction-budget", 288, "--kv-eviction-interval", 64]
    with recorded(monkeypatch) as recorder:
        data, picture = inspect(
            tiny_model_kv4, prompt_file, *budget, "--after", after, "--max-tokens", 150,
            "--find", NEEDLE, "--find", "48213", "--spans", 5,
        )  # fmt: skip
    (lives,) = recorder.lives.values()
    evictions = lives[0].evictions
    assert data["evictions"] == len(evictions) >= (1 if after == "prefill" else 2)
    seen = evictions[0 if after == "prefill" else -1]
    prompt = tokens_of(tiny_model_kv4)
    assert data["prompt_tokens"] == len(prompt) == evictions[0].n
    assert data["num_tokens"] == seen.n
    expected = [
        [[*head, *range(seen.tail_start, seen.n)] for head in layer] for layer in seen.positions
    ]
    assert positions(data) == expected
    assert {layer["tail_start"] for layer in data["layers"]} == {seen.tail_start}
    assert [[head["pages"] for head in layer["heads"]] for layer in data["layers"]] == [
        [len(head) // 32 for head in layer] for layer in seen.positions
    ]
    store, tail = 8, -(-(seen.n - seen.tail_start) // 32)
    assert data["blocks_after"] == store + tail
    if after == "prefill":
        assert data["blocks_before"] == -(-len(prompt) // 32)
    check_finds(data, expected, prompt, tiny_model_kv4)
    check_spans(data, seen, prompt, tiny_model_kv4)
    check_picture(picture)
    report = capsys.readouterr().out
    assert f"budget 288 tokens per KV head\nprompt   {len(prompt)} tokens" in report
    assert data["spans"][0]["text"].replace("\n", "⏎")[:40] in report
    assert f"whole in {whole_heads(data['find'][0])} of 16 heads" in report


def whole_heads(found: dict[str, Any]) -> int:
    length = found["positions"][1] - found["positions"][0]
    return sum(count == length for layer in found["tokens_held"] for count in layer)


def check_finds(data, expected, prompt, model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert [found["text"] for found in data["find"]] == [NEEDLE, "48213"]
    for found in data["find"]:
        start, stop = found["positions"]
        assert found["text"] in tokenizer.decode(prompt[start:stop])
        assert found["text"] not in tokenizer.decode(prompt[start + 1 : stop])
        assert found["cached"]
        assert found["tokens_held"] == [
            [len(set(head) & set(range(start, stop))) for head in layer] for layer in expected
        ]


def check_spans(data, seen, prompt, model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    heads = [set(head) for layer in seen.positions for head in layer]
    assert 1 <= len(data["spans"]) <= 5
    for span in data["spans"]:
        start, stop = span["positions"]
        assert 0 <= start < stop <= seen.tail_start
        held = sum(p in head for head in heads for p in range(start, stop))
        assert span["share_of_heads"] == pytest.approx(held / (stop - start) / len(heads))
        if stop <= len(prompt):
            assert span["text"] == tokenizer.decode(prompt[start:stop])


def check_picture(path: Path) -> None:
    """A PNG of plausible size with colours in it."""
    from PIL import Image

    assert path.read_bytes().startswith(PNG)
    with Image.open(path) as image:
        image.load()
        assert 1200 <= image.width <= 2400
        assert 700 <= image.height <= 3000
        colours = image.convert("RGB").getcolors(1 << 24)
        assert colours is not None and len(colours) > 100


def test_the_answer_is_that_of_the_evicted_model(tiny_model, prompt_file, monkeypatch) -> None:
    """The run shown is a real one: its tokens are the oracle's under the kept positions."""
    with recorded(monkeypatch) as recorder:
        data, _ = inspect(tiny_model, prompt_file, "--kv-eviction-budget", 128, "--max-tokens", 100)
    (lives,) = recorder.lives.values()
    assert data["eviction"]["policy"] == "ada-defensive", "auto, without a profile"
    prompt, oracle = tokens_of(tiny_model), MaskedModel(tiny_model)
    output = data["answer_token_ids"]
    assert len(output) > 20
    agreed, total = check_tokens(oracle, prompt, output, lives)
    assert agreed == total == len(output)
    agreed, total = check_tokens(oracle, prompt, output, [Life(len(prompt))])
    assert agreed < total, "full attention says the same, so the answer shows nothing"


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_eviction_before_the_question(tiny_model, prompt_file, monkeypatch, capsys, chat) -> None:
    question = "Which number is magic?"
    flags = ["--kv-eviction-budget", 128, "--question", question, "--max-tokens", 8]
    with recorded(monkeypatch) as recorder:
        data, _ = inspect(
            tiny_model, prompt_file, *flags, "--find", NEEDLE, "--find", question,
            *(["--chat"] if chat else []),
        )  # fmt: skip
    (lives,) = recorder.lives.values()
    (seen,) = lives[0].evictions
    context = tokens_of(tiny_model, f"<s><|user|>{TEXT}" if chat else TEXT)
    assert data["num_tokens"] == data["evict_at"] == seen.n == len(context)
    assert data["prompt_tokens"] > seen.n
    assert positions(data) == [
        [[*head, *range(seen.tail_start, seen.n)] for head in layer] for layer in seen.positions
    ]
    assert [found["cached"] for found in data["find"]] == [True, False]
    report = capsys.readouterr().out
    assert "after this eviction, so all of it is in the cache" in report


def test_the_page_holds_what_the_json_says(tiny_model_kv4, prompt_file) -> None:
    """Two policies at two budgets in one engine, and one of these runs in an engine of its own."""
    page = prompt_file.with_name("kept.html")
    same = ["--max-tokens", 12, "--find", "48213", "--kv-eviction-interval", 0]
    data, picture = inspect(
        tiny_model_kv4, prompt_file, *same, "--kv-eviction", "ada-snapkv", "--html", page,
        "--compare", "streaming-llm", "--budgets", "12%,288",
    )  # fmt: skip
    check_picture(picture)
    _, _, rest = page.read_text().partition('<script type="application/json" id="data">')
    shown = json.loads(rest.partition("</script>")[0])
    prompt = tokens_of(tiny_model_kv4)
    assert len(shown["tokens"]) == len(prompt) and "".join(shown["tokens"]).endswith(TEXT)
    assert [found[1:] for found in shown["find"]] == [f["positions"] for f in data["find"]]
    runs = [data, *data["others"]]
    assert [(run["policy"], run["budget"]) for run in shown["runs"]] == [
        ("ada-snapkv", "12%"), ("ada-snapkv", "288"),
        ("streaming-llm", "12%"), ("streaming-llm", "288"),
    ]  # fmt: skip
    assert shown["layers"] == [layer["layer"] for layer in data["layers"]]
    kept = []
    for run, found in zip(shown["runs"], runs, strict=True):
        assert found["eviction"]["policy"] == run["policy"]
        assert str(found["eviction"]["budget"]) == run["budget"]
        assert found["answer"] == run["answer"] and found["evictions"] == 1
        counts = [[0] * len(prompt) for _ in shown["layers"]]
        for row, layer in zip(counts, positions(found), strict=True):
            for head in layer:
                for position in head:
                    row[position] += 1
        assert base64.b64decode(run["counts"]) == b"".join(map(bytes, counts))
        assert max(map(max, counts)) == 4
        kept.append(sum(sum(row) for row in counts))
    assert kept[0] < kept[1] and kept[2] < kept[3]
    alone, _ = inspect(
        tiny_model_kv4, prompt_file, *same, "--kv-eviction", "streaming-llm",
        "--kv-eviction-budget", "12%",
    )  # fmt: skip
    assert positions(alone) == positions(runs[2])
    assert alone["answer_token_ids"] == runs[2]["answer_token_ids"]


def failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[object]
) -> str:
    """The last line that a run in this process prints before it fails."""
    from vllm_kvevict.tools.inspect.__main__ import main

    try:
        status: Any = main([str(argument) for argument in arguments])
    except SystemExit as left:
        status = left.code
    assert status not in (0, None)
    return status if isinstance(status, str) else capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--kv-eviction-budget", 100000],
            "error: nothing was evicted, because {n} tokens fit the budget of 100000 tokens per "
            "KV head (eviction starts at 100001 tokens); give a longer prompt or lower "
            "--kv-eviction-budget",
        ),
        (
            ["--kv-eviction-budget", "{almost}", "--block-size", 64],
            "error: nothing was evicted, because {n} tokens fit the budget of {almost} tokens per "
            "KV head (eviction starts at {needed} tokens in blocks of 64); give a longer prompt "
            "or lower --kv-eviction-budget",
        ),
        (["--prompt-file", "/absent.txt"], "error: --prompt-file: there is no file /absent.txt"),
        (["--kv-eviction", "none"], "error: eviction is off, so there is nothing to draw: give "
         "--kv-eviction"),
        (["--find", "nowhere"], "error: --find 'nowhere': the prompt does not contain this text"),
        (["--at", 9999], "error: --at: must be between 1 and the prompt's {n} tokens, not 9999"),
        (["--max-tokens", 1], "error: --max-tokens: must be at least 2, not 1"),
        (["--spans", -1], "error: --spans: must be at least 0, not -1"),
        (["--json", "/absent/kept.json"], "error: --json: there is no folder /absent"),
        (["--html", "/absent/page.html"], "error: --html: there is no folder /absent"),
        (["--compare", "snapkv"], "error: --compare is for the page: add --html FILE"),
        (["--budgets", "25%"], "error: --budgets is for the page: add --html FILE"),
        (["--html", "p.html", "--budgets", "6%,x"],
         "error: --budgets: give tokens (1024) or a share (25%), not 'x'"),
        (["--html", "p.html", "--budgets", "6%,256"],
         "error: --budgets 6%,256: --kv-eviction-budget 128 is given too; give one of the two"),
        (["--html", "p.html", "--compare", "ada-snapkv"],
         "error: --compare ada-snapkv: the other policy is ada-snapkv too; name another, or give "
         "--kv-eviction"),
        (["-tp", 2], "error: inspect runs on one rank: leave --tensor-parallel-size and -pp at 1"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(
    tiny_model, prompt_file, monkeypatch, capsys, flags, sentence
) -> None:
    n = len(tokens_of(tiny_model))
    # In blocks of 64 there is no whole block to evict.
    almost = n - 1
    needed = ((almost - 32) // 64 + 1) * 64 + 32
    assert n < needed
    picture = prompt_file.with_name("kept.png")
    arguments = [
        tiny_model, "--prompt-file", prompt_file, "--output", picture,
        "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", 128,
        *(str(flag).format(almost=almost) for flag in flags),
    ]  # fmt: skip
    line = failure(capsys, monkeypatch, arguments)
    assert line == sentence.format(n=n, almost=almost, needed=needed)
    assert not picture.exists()


def test_unknown_policy_and_missing_models(tiny_model, prompt_file, monkeypatch, capsys) -> None:
    rest = ["--prompt-file", prompt_file]
    unknown = failure(capsys, monkeypatch, [tiny_model, *rest, "--kv-eviction", "best"])
    assert unknown.startswith("error: KV eviction: --kv-eviction: unknown policy 'best'; choose ")
    missing = failure(capsys, monkeypatch, ["/absent/model", *rest])
    assert missing == "error: there is no model folder /absent/model"
    (prompt_file.parent / "empty").mkdir()
    empty = failure(capsys, monkeypatch, [prompt_file.parent / "empty", *rest])
    assert empty.startswith("error: ")


def test_variants_that_cannot_run(tiny_model, prompt_file, monkeypatch, capsys) -> None:
    page = prompt_file.with_name("kept.html")
    given = [tiny_model, "--prompt-file", prompt_file, "--html", page]
    for name in ("none", "auto", "best"):
        line = failure(capsys, monkeypatch, [*given, "--compare", name])
        assert line.startswith(f"error: --compare: unknown policy '{name}'; choose from ")
    line = failure(capsys, monkeypatch, [*given, "--compare", "ada-defensive"])
    assert line.startswith("error: --compare ada-defensive: the other policy is ada-defensive too")
    given += ["--kv-eviction", "snapkv", "--budgets"]
    line = failure(capsys, monkeypatch, [*given, "25%,32"])
    assert line.startswith("error: --budgets: KV eviction: budget 32 leaves no room")
    line = failure(capsys, monkeypatch, [*given, "25%,100%"])
    assert line.startswith("error: nothing was evicted, because ")
    assert line.endswith("give a longer prompt or lower --budgets")
    assert not page.exists()


def test_missing_matplotlib(tiny_model, prompt_file, monkeypatch, capsys) -> None:
    monkeypatch.setattr("vllm_kvevict.tools.inspect.options.find_spec", lambda name: None)
    line = failure(capsys, monkeypatch, [tiny_model, "--prompt-file", prompt_file])
    assert line == (
        "error: inspect draws with matplotlib, which is not installed: "
        "pip install 'matplotlib>=3.9'"
    )


def test_the_command(tiny_model, prompt_file) -> None:
    """As a user types it: the report alone on stdout, the picture where it was asked for."""
    picture = prompt_file.with_name("here.png")
    done = forked.run(
        "vllm_kvevict.tools.inspect", tiny_model, "--prompt-file", prompt_file, "--output", picture,
        "--kv-eviction", "snapkv", "--kv-eviction-budget", "25%", "--max-tokens", "4",
        "--max-model-len", "2048", "--kv-cache-memory-bytes", "64M",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    budget = len(tokens_of(tiny_model)) // 4
    assert done.stdout.startswith(
        f"policy   snapkv, budget {budget} tokens per KV head (25% of the prompt)\n"
    )
    assert done.stdout.endswith(f"written  {picture}\n")
    check_picture(picture)
