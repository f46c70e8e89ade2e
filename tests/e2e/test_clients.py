"""Public clients of the OpenAI API against one server that evicts.

What an answer should be comes from a plain HTTP request to the same server, which
``test_server.py`` compares with the engine and the oracle.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.test_server import BASE, EVICTION, MESSAGES, complete, wait_for
from tests.models import random_text

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
needs_clients = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="LangChain, lm-eval and guidellm are not installed: run `make clients`",
)
SAMPLING: dict[str, Any] = dict(temperature=0, max_tokens=70)
IGNORE: dict[str, Any] = dict(ignore_eos=True)
IDS: dict[str, Any] = IGNORE | dict(return_token_ids=True)
OWN: dict[str, Any] = dict(vllm_xargs=dict(kv_eviction_budget=64))
SCHEMA: dict[str, Any] = dict(
    title="place",
    description="A place",
    type="object",
    properties=dict(city=dict(type="string", pattern="^[a-z]{40}$")),
    required=["city"],
    additionalProperties=False,
)
TOOL: dict[str, Any] = dict(
    type="function", function=dict(name="weather", description="Weather", parameters=SCHEMA)
)


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    grammars = json.dumps(dict(backend="xgrammar", disable_any_whitespace=True))
    arguments = [*BASE, *EVICTION, "--served-model-name", "tiny"]
    arguments += ["--structured-outputs-config", grammars]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("server") / "log"
    # Strict tags for tools allow white space without end, which a random model likes.
    env = dict(VLLM_ENFORCE_STRICT_TOOL_CALLING="0")
    with Server(tiny_model, arguments, log, env=env) as server:
        yield server


@pytest.fixture
def evicting(server) -> Iterator[Server]:
    """The server; the test's requests must have made it evict."""
    metric = "vllm_kvevict:evictions_total"
    wait_for(server, "vllm:num_requests_running", 0)
    before = server.metric(metric)
    yield server
    wait_for(server, "vllm:num_requests_running", 0)
    assert server.metric(metric) - before >= 4


def chat(server: Server, **more: Any) -> dict[str, Any]:
    body = dict(model="tiny", messages=MESSAGES) | SAMPLING | IDS | more
    return server.post("/v1/chat/completions", body)["choices"][0]


def test_openai_package(evicting):
    from openai import BadRequestError, OpenAI

    expected, less = chat(evicting), chat(evicting, **OWN)
    assert expected["token_ids"] != less["token_ids"]
    client = OpenAI(base_url=evicting.url + "/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    asked: dict[str, Any] = dict(model="tiny", messages=MESSAGES, **SAMPLING)

    answer = create(**asked, extra_body=IDS)
    assert answer.choices[0].token_ids == expected["token_ids"]
    assert answer.usage.completion_tokens == SAMPLING["max_tokens"]

    pieces, ids = [], []
    with create(**asked, extra_body=IDS, stream=True) as stream:
        for choice in (choice for chunk in stream for choice in chunk.choices):
            pieces.append(choice.delta.content or "")
            ids += getattr(choice, "token_ids", None) or []
    assert ids == expected["token_ids"]
    assert "".join(pieces) == expected["message"]["content"]

    own = create(**asked, extra_body=IDS | OWN)
    assert own.choices[0].token_ids == less["token_ids"]
    with pytest.raises(BadRequestError, match="kv_eviction_budget 3 leaves no room"):
        create(**asked, extra_body=dict(vllm_xargs=dict(kv_eviction_budget=3)))

    shape = dict(type="json_schema", json_schema=dict(name="place", schema=SCHEMA))
    asked |= dict(max_tokens=300)
    content = create(**asked, response_format=shape).choices[0].message.content
    check_place(json.loads(content))
    chosen = dict(type="function", function=dict(name="weather"))
    call = create(**asked, tools=[TOOL], tool_choice=chosen).choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    check_place(json.loads(call.function.arguments))


def check_place(value: dict[str, Any]) -> None:
    assert list(value) == ["city"]
    assert len(value["city"]) == 40 and value["city"].isalpha()


def run(*command: str | Path) -> str:
    """What a client of .venv-clients prints; it reaches nothing but the server."""
    settings = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    settings |= dict(GUIDELLM__MAX_WORKER_PROCESSES="1")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@needs_clients
def test_langchain(evicting, tmp_path):
    expected, less = chat(evicting), chat(evicting, **OWN)
    case = tmp_path / "case.json"
    bodies = dict(plain=IGNORE, own=IGNORE | OWN)
    options = dict(model="tiny", **SAMPLING)
    asked = dict(messages=MESSAGES, options=options, schema=SCHEMA, tool=TOOL, **bodies)
    case.write_text(json.dumps(asked))
    script = Path(__file__).parent / "clients" / "langchain_chat.py"
    found = json.loads(run(PYTHON, script, evicting.url, case))
    assert found["content"] == found["streamed"] == expected["message"]["content"]
    assert found["own"] == less["message"]["content"] != found["content"]
    assert found["tokens"] == SAMPLING["max_tokens"]
    check_place(found["shaped"])
    assert [call["name"] for call in found["called"]] == ["weather"]
    check_place(found["called"][0]["args"])


TASK = """\
task: recite
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\0"], max_gen_toks: 70, ignore_eos: true}}
metric_list: [{{metric: exact_match}}]
"""


@needs_clients
def test_lm_eval_local_completions(tiny_model, evicting, tmp_path):
    """A task whose targets are the server's own greedy answers scores 1."""
    prompts = [random_text(100, seed=n) for n in range(4)]
    answers = [complete(evicting, prompt, **SAMPLING)[0]["text"] for prompt in prompts]
    data = tmp_path / "recite.jsonl"
    rows = [dict(prompt=p, answer=a) for p, a in zip(prompts, answers, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recite.yaml").write_text(TASK.format(file=data))
    model = f"model=tiny,base_url={evicting.url}/v1/completions,tokenizer={tiny_model}"
    model += ",tokenizer_backend=huggingface,tokenized_requests=False,num_concurrent=2"
    tool = PYTHON.with_name("lm-eval")
    arguments = ["--model", "local-completions", "--model_args", model, "--tasks", "recite"]
    arguments += ["--include_path", tmp_path, "--output_path", tmp_path / "out.json"]
    run(tool, "run", *arguments)
    results = json.loads(next(tmp_path.glob("out*.json")).read_text())["results"]["recite"]
    assert results["exact_match,none"] == 1.0


@needs_clients
def test_guidellm_replays_arrivals(tiny_model, evicting, tmp_path):
    """A recorded trace: arrival times and lengths.

    guidellm 0.8.1 may leave the record that reaches it last out of its report: it sets
    ``shutdown_event`` before it queues that record (``received_callback``), and stops reading when
    it sees the event while the queue is empty (``request_updates``), so a busy machine loses one
    now and then. All that it sent and was answered is in the server's counters.
    """
    trace = tmp_path / "trace.jsonl"
    rows = [dict(timestamp=0.2 * n, input_length=200 + 20 * n, output_length=40) for n in range(6)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tmp_path / "report.json"
    source = dict(kind="json_file", path=str(trace))
    counters = ("vllm:request_success_total", "vllm:generation_tokens_total")
    before = [evicting.metric(name) for name in counters]
    run(
        PYTHON.with_name("guidellm"),
        *("run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={evicting.url},model=tiny"),
        *("--profile", "kind=replay"),
        *("--tokenizer", f"kind=hf_auto,model={tiny_model}"),
        *("--data", json.dumps(dict(kind="trace_synthetic", source=source))),
        *("--output", f"kind=json,path={report}"),
    )
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    recorded = [r["output_tokens"] for r in requests["successful"]]
    assert len(rows) - 1 <= len(recorded) <= len(rows) and set(recorded) == {40}
    wait_for(evicting, "vllm:num_requests_running", 0)
    after = [evicting.metric(name) for name in counters]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(rows), 40 * len(rows)]
