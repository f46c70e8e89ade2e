"""A real `vllm serve` with eviction: what clients see equals the engine in this process."""

import json
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from benchmarks.server import Server
from tests.models import random_prompt, random_text
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

NEW_TOKENS = 70
PROMPTS = [random_prompt(150 + 11 * n, seed=n) for n in range(24)]
MESSAGES = [
    dict(role="system", content=random_text(20, seed=1)),
    dict(role="user", content=random_text(150, seed=2)),
]
BASE = [
    "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "64M",
    "--block-size", "32", "--max-model-len", "2048",
]  # fmt: skip
EVICTION = [
    "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "96", "--kv-eviction-interval", "32",
    "--kv-eviction-shared-blocks", "evict",
]  # fmt: skip
GREEDY = dict(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True)
SCHEMA = dict(
    type="object",
    properties={name: dict(type="string", pattern="^[a-z]{30}$") for name in ("first", "second")},
    required=["first", "second"],
    additionalProperties=False,
)


@pytest.fixture(scope="module")
def chat_prompt(tiny_model) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def truth(tiny_model, chat_prompt) -> list[Any]:
    """Completions of PROMPTS and of the chat, from an engine that the oracle confirms."""
    prompts = [*PROMPTS, chat_prompt]
    # Under `keep`, when a request evicts may depend on what else runs.
    settings = dict(policy="ada-snapkv", budget=96, interval=32, shared_blocks="evict")
    with engine(tiny_model, settings, max_model_len=2048) as run:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
        requests = [dict(prompt_token_ids=prompt) for prompt in prompts]
        outputs = run.llm.generate(requests, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        oracle = MaskedModel(tiny_model)
        for index in (0, 23, 24):
            lives = run.lives()[index]
            assert len(lives[0].evictions) >= 2
            tokens = list(answers[index].token_ids)
            assert check_tokens(oracle, prompts[index], tokens, lives) == (NEW_TOKENS, NEW_TOKENS)
        for answer, lives in zip(answers, run.lives(), strict=True):
            answer.evictions = sum(len(life.evictions) for life in lives)
    return answers


@pytest.fixture(scope="module")
def server(tiny_model, truth, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    grammars = json.dumps(dict(backend="xgrammar", disable_any_whitespace=True))
    arguments = [*BASE, *EVICTION, "--served-model-name", "tiny"]
    arguments += ["--structured-outputs-config", grammars]
    # Totals are logged at every pause: `logged` compares them.
    env = dict(VLLM_LOG_STATS_INTERVAL="0.05")
    with Server(tiny_model, arguments, log, env=env) as server:
        yield server


def complete(
    server: Server, prompt: list[int] | list[list[int]], **options: Any
) -> list[dict[str, Any]]:
    body = dict(model="tiny", prompt=prompt) | GREEDY | options
    return server.post("/v1/completions", body)["choices"]


def events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer; closing the generator drops the connection."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body | dict(stream=True)).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def wait_for(server: Server, metric: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while server.metric(metric) != value:
        assert time.monotonic() < deadline, f"{metric} is {server.metric(metric)}, not {value}"
        time.sleep(0.1)


def test_health_and_models(server):
    assert urllib.request.urlopen(server.url + "/health", timeout=10).status == 200
    with urllib.request.urlopen(server.url + "/v1/models", timeout=10) as answer:
        models = json.load(answer)["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 2048)]


def test_completions_one_after_the_other(server, truth):
    for prompt, expected in list(zip(PROMPTS, truth, strict=False))[::6]:
        answer = complete(server, prompt)[0]
        assert answer["token_ids"] == list(expected.token_ids)
        assert answer["text"] == expected.text
        assert answer["finish_reason"] == "length"


def test_completions_at_once(server, truth):
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: complete(server, prompt)[0], PROMPTS))
    for answer, expected in zip(answers, truth, strict=False):
        assert answer["token_ids"] == list(expected.token_ids)


def test_chat(server, truth, chat_prompt):
    body = dict(model="tiny", messages=MESSAGES) | GREEDY
    answer = server.post("/v1/chat/completions", body)
    assert answer["prompt_token_ids"] == chat_prompt
    assert answer["choices"][0]["token_ids"] == list(truth[-1].token_ids)
    assert answer["choices"][0]["message"]["content"] == truth[-1].text


def test_streaming(server, truth):
    body = dict(model="tiny", prompt=PROMPTS[12]) | GREEDY
    chunks = [chunk["choices"][0] for chunk in events(server, "/v1/completions", body)]
    assert len(chunks) > 10
    assert "".join(chunk["text"] for chunk in chunks) == truth[12].text
    assert [t for chunk in chunks for t in chunk["token_ids"] or []] == list(truth[12].token_ids)

    body = dict(model="tiny", messages=MESSAGES) | GREEDY
    deltas = [c["choices"][0]["delta"] for c in events(server, "/v1/chat/completions", body)]
    assert "".join(delta.get("content") or "" for delta in deltas) == truth[-1].text


def test_two_answers(server):
    sampling = dict(temperature=0.8, seed=7)
    answers = complete(server, PROMPTS[20], n=2, **sampling)
    assert [answer["index"] for answer in answers] == [0, 1]
    for index, answer in enumerate(answers):
        alone = complete(server, PROMPTS[20], **sampling | dict(seed=7 + index))[0]
        assert answer["token_ids"] == alone["token_ids"]
    assert answers[0]["token_ids"] != answers[1]["token_ids"]


def test_stop(server, truth):
    whole = truth[20].text
    late = whole[2 * len(whole) // 3 :]
    stop = next(word for word in late.split() if len(word) > 2 and word.isascii())
    answer = complete(server, PROMPTS[20], stop=[stop])[0]
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == stop
    assert answer["text"] == whole[: whole.index(stop)]


def test_logprobs(server, truth):
    answer = complete(server, PROMPTS[7], logprobs=1)[0]
    expected = [
        entry[token].logprob
        for token, entry in zip(truth[7].token_ids, truth[7].logprobs, strict=True)
    ]
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def test_json_schema(server):
    answer = server.post(
        "/v1/chat/completions",
        dict(
            model="tiny",
            messages=MESSAGES,
            temperature=0,
            max_tokens=300,
            response_format=dict(
                type="json_schema", json_schema=dict(name="two", schema=SCHEMA, strict=True)
            ),
        ),
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 33, "long enough to evict in decode"
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert sorted(value) == ["first", "second"]
    assert all(len(text) == 30 and text.isalpha() and text.islower() for text in value.values())


def test_a_client_that_leaves_frees_everything(server):
    wait_for(server, "vllm:num_requests_running", 0)
    body = dict(model="tiny", prompt=PROMPTS[23]) | GREEDY | dict(max_tokens=1600)
    streams = [events(server, "/v1/completions", body) for _ in range(4)]
    for stream in streams:
        for _ in range(40):  # past the first eviction in decode
            next(stream)
    assert server.metric("vllm:num_requests_running") == 4
    assert server.metric("vllm:kv_cache_usage_perc") > 0
    assert server.metric("vllm_kvevict:blocks_saved") > 0
    for stream in streams:
        stream.close()
    wait_for(server, "vllm:num_requests_running", 0)
    wait_for(server, "vllm:kv_cache_usage_perc", 0)


def metrics(server: Server, **labels: str) -> dict[str, float]:
    """Our samples of /metrics that have these labels, summed over their other labels."""
    found: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith("vllm_kvevict:") and labels.items() <= sample.labels.items():
                found[sample.name.removeprefix("vllm_kvevict:")] += sample.value
    return found


def logged(server: Server, engine: int) -> dict[str, int]:
    """The last totals that the core of one engine logged."""
    log = server.log.read_text()
    # A single engine core has no number.
    line = re.findall(rf"EngineCore(?:_DP{engine})? .*KV eviction: (evictions=.*)", log)[-1]
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}


def check_metrics(server: Server, engine: int = 0) -> dict[str, float]:
    """/metrics says what the engine core says in its log; returns our samples of the engine."""
    totals, mine = logged(server, engine), dict(model_name="tiny", engine=str(engine))
    found = metrics(server, **mine)
    for reason in ("prefill", "decode"):
        by_policy = metrics(server, **mine, policy="ada-snapkv", reason=reason)
        assert by_policy["evictions_total"] == totals[f"evictions_{reason}"] > 0
    assert found["evictions_total"] == found["eviction_seconds_count"] == totals["evictions"]
    assert found["evicted_tokens_total"] == totals["tokens_evicted"] > 0
    assert found["freed_blocks_total"] == totals["blocks_freed"] > 0
    assert found["store_blocks_total"] == totals["store_blocks_allocated"] > 0
    assert found["postponed_evictions_total"] == totals["postponed"] == 0
    assert found["capped_prefix_hits_total"] == totals["prefix_hits_capped"]
    assert 0 < found["request_kept_share_sum"] < 0.8 * found["request_kept_share_count"]
    assert found["eviction_seconds_sum"] > 0
    samples = found["head_budget_spread_count"]
    assert samples == -(-totals["evictions"] // 16)
    assert samples <= found["head_budget_spread_sum"] <= 2 * samples, "two KV heads"
    assert found["blocks_saved"] == 0
    assert metrics(server, **mine, policy="ada-snapkv", budget="96")["config_info"] == 1
    return found


DRAFTS = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=1)


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", [[], ["--speculative-config", json.dumps(DRAFTS)]])
def test_several_api_servers_and_engines(tiny_model, truth, tmp_path, drafts):
    """Two of each: every report reaches one API server, and /metrics adds up over both."""
    several = ["--api-server-count", "2", "--data-parallel-size", "2"]
    arguments = [*BASE, *EVICTION, "--served-model-name", "tiny", *several, *drafts]
    log_file, env = tmp_path / "log", dict(VLLM_LOG_STATS_INTERVAL="0.001")
    with (
        Server(tiny_model, arguments, log_file, timeout_s=600, env=env) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(threads.map(lambda prompt: complete(server, prompt)[0], PROMPTS[:8]))
        # The other API server may hear of the last request a moment later.
        wait_for(server, "vllm_kvevict:request_kept_share_count", 8)
        engines = [check_metrics(server, engine) for engine in (0, 1)]
        if drafts:
            assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 100
    for answer, expected in zip(answers, truth, strict=False):
        assert answer["token_ids"] == list(expected.token_ids)
    caused = sum(expected.evictions for expected in truth[:8])
    assert sum(found["evictions_total"] for found in engines) == caused >= 16
    log = log_file.read_text()
    assert "(ApiServer_0 " in log and "(ApiServer_1 " in log
    assert log.count("KV eviction is on") == 1


def test_totals_in_the_log(server, truth):
    """Complete when the engine is idle, where a line is due. Last, because it ends the server."""
    wait_for(server, "vllm:num_requests_running", 0)
    before = server.evictions()["evictions"]
    complete(server, PROMPTS[3])
    deadline = time.monotonic() + 60
    while logged(server, 0)["evictions"] < before + 3:
        assert time.monotonic() < deadline, "no totals when the engine became idle"
        time.sleep(0.1)
    wait_for(server, "vllm_kvevict:blocks_saved", 0)
    ended = check_metrics(server)["request_kept_share_count"]
    assert ended >= server.metric("vllm:request_success_total") > 0, "clients that left, too"
    totals = logged(server, 0)
    assert server.stop() == 0, server.log.read_text()[-4000:]
    assert server.evictions() == logged(server, 0) == totals
    assert totals["evictions_prefill"] >= 1 and totals["evictions_decode"] >= 1
    assert totals["blocks_freed"] > totals["store_blocks_allocated"] > 0
    assert totals["postponed"] == 0
