"""What is asked of a server, in which order, and what it must count."""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from benchmarks.quality.budget import kept
from benchmarks.quality.cell import FULL_CELL
from benchmarks.quality.endpoint import Completion, Endpoint, EndpointError
from benchmarks.quality.journal import Journal
from benchmarks.quality.measure import Plan, measure, score
from benchmarks.quality.options import Options
from benchmarks.quality.own_server import LAYERS, Variant, server_key, variants
from benchmarks.quality.prompt import AWARE, SCENARIOS, Prompt
from benchmarks.quality.ruler.tasks import make
from benchmarks.quality.run import Run
from tests.http_stand_in import JsonHandler, served
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule

STORES = "--kv-eviction-store-dtype int4"
METRICS = """# HELP vllm:cache_config_info
vllm:cache_config_info{block_size="16",engine="0"} 1.0
vllm_kvevict:evictions_total{engine="0"} 5.0
vllm_kvevict:evictions_total{engine="1"} 2.0
"""


class Handler(JsonHandler):
    seen: ClassVar[list[dict]] = []
    refuses = True

    def do_GET(self) -> None:
        answer = METRICS if self.path == "/metrics" else '{"data": [{"id": "served"}]}'
        self.reply(200, answer)

    def do_POST(self) -> None:
        body = self.body()
        self.seen.append(body)
        if self.path == "/tokenize":
            return self._tokenize(body)
        policy = body.get("vllm_xargs", {}).get("kv_eviction")
        if "prompt_logprobs" in body:
            # As vLLM: nothing of the first token, and of each other its id as text.
            found = [None, *({str(i): {"logprob": -i / 2}} for i in body["prompt"][1:])]
            choice = {"text": "", "token_ids": [1], "prompt_logprobs": found}
            return self.reply(200, {"choices": [choice]})
        if policy == "no-such-policy" and self.refuses:
            return self.reply(400, '{"error": "unknown policy"}')
        text = f"{policy} {len(body['prompt'])}"
        return self.reply(200, {"choices": [{"text": text, "token_ids": [1, 2]}]})

    def _tokenize(self, body: dict) -> None:
        """A base model's: no chats, and 2 begins a text."""
        if "messages" in body:
            reason = "so you must provide a chat template if the tokenizer does not define one."
            return self.reply(400, {"error": {"message": reason}})
        ids = [2] * body["add_special_tokens"] + [ord(letter) for letter in body["prompt"]]
        return self.reply(200, {"tokens": ids})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    Handler.seen, Handler.refuses = [], True
    with served(Handler) as url:
        yield Endpoint(f"{url}/v1/")


@pytest.fixture
def prompts() -> list[Prompt]:
    return [
        Prompt(make(task, 600, n), tuple(range(300 + 40 * n)), 250 + 40 * n)
        for n, task in enumerate(("s-niah", "s-niah", "mv-niah"))
    ]


def test_a_base_model_gets_the_text_of_the_messages(endpoint):
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    assert endpoint.tokenize(messages) == [2, *map(ord, "ab\nc\n")]


def plan(**changes) -> Plan:
    labels = {"snapkv": "snapkv", "ada-snapkv, avg 5": "ada-snapkv"}
    settings = dict(
        labels=labels, budgets=("20%", "80%"), scenarios=SCENARIOS, max_tokens=4, window=32,
        block_size=32,
    )  # fmt: skip
    return Plan(**settings | changes)


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path / "answers.jsonl", resume=False, model="served")


def test_requests_of_a_sample(endpoint, prompts, journal):
    answers = measure(endpoint, plan(), prompts, 2, journal)
    assert len(answers) == 9 and all(len(row) == 3 for row in answers.values())
    for prompt in prompts:
        asked = [body for body in Handler.seen if body["prompt"] == list(prompt.ids)]
        assert len(asked) == 9
        assert all(body["temperature"] == 0 and body["model"] == "served" for body in asked)
        first, *others = [body["vllm_xargs"] for body in asked]
        assert first == {"kv_eviction": "none"}, "the full cache comes first"
        points = [xargs.get("kv_eviction_at") for xargs in others]
        assert points == [None] * 4 + [prompt.context] * 4
        assert {xargs["kv_eviction_interval"] for xargs in others} == {0}
        assert {xargs["kv_eviction_when"] for xargs in others} == {"always"}
        assert {(x["kv_eviction"], x["kv_eviction_budget"]) for x in others} == {
            (policy, budget) for policy in ("snapkv", "ada-snapkv") for budget in ("20%", "80%")
        }
    assert [answer.text for answer in answers[FULL_CELL]] == ["none 300", "none 340", "none 380"]


def test_a_run_with_other_flags_finds_no_answers_in_the_same_folder(tmp_path):
    found = []
    for flags in ("", STORES):
        options = Options(model=str(tmp_path), layers="auto", policies=(), server_args=flags)
        (variant,) = variants(options)
        key = server_key(options, tmp_path, variant.flags)
        for _ in range(2):
            journal = Journal(tmp_path / "answers.jsonl", True, key)
            found.append(journal.find((1, 2), 4, {}))
            journal.enter((1, 2), 4, {}, Completion(flags, ()))
    assert [one and one.text for one in found] == [None, "", None, STORES]


def test_scores_keep_the_order_of_the_samples(prompts):
    class Answer:
        def __init__(self, text: str) -> None:
            self.text = text

    texts = ["nothing", prompts[1].sample.answers[0], " ".join(prompts[2].sample.answers[:2])]
    found = score(prompts, map(Answer, texts))
    assert found == {"s-niah": [0.0, 1.0], "mv-niah": [0.5]}


@pytest.mark.parametrize("budget", ["10%", "40%", "97%", "100%", "96", "400"])
def test_kept_is_what_a_request_holds(budget):
    """Against the schedule of a request, token by token: store and tail after the eviction."""
    for point in (40, 65, 333, 640, 1001):
        share = float(budget[:-1]) / 100 if budget.endswith("%") else None
        tokens = None if share else int(budget)
        rule = EvictionRule(
            block_size=32, window=32, interval=0, budget_tokens=tokens, budget_share=share
        )
        request = EvictionProgress(rule, point, point)
        found = kept(budget, point, window=32, block_size=32)
        assert found.evicts == request.is_due(point)
        if not found.evicts:
            assert found.tokens == point
            continue
        _, tail_start = request.evict(point)
        held = len(range(tail_start, point)) + request.store_blocks * 32
        assert found.tokens == held < point


def test_expected_counters(prompts, journal):
    assert plan(budgets=("100%",)).expected(prompts, journal) == {
        "evictions": 0,
        "tokens_evicted": 0,
    }
    one = plan(budgets=("20%",), scenarios=(AWARE,), labels={"snapkv": "snapkv"})
    # Of 300, 340 and 380 tokens the windows leave 256, 288 and 320 candidates; 20% beside the
    # window are 28, 36 and 44 tokens, so one block is kept.
    assert one.expected(prompts, journal) == {
        "evictions": 3,
        "tokens_evicted": 256 + 288 + 320 - 3 * 32,
    }


def test_expected_counters_of_stores_in_few_bits(prompts, journal):
    settings = dict(budgets=("20%",), scenarios=(AWARE,), labels={"snapkv": "snapkv"})
    # The same blocks hold 120 tokens each, and those of an FP8 cache 60.
    for flags, held in ((STORES, 120), (f"{STORES} --kv-cache-dtype fp8", 60)):
        found = Options(model=".", policies=("snapkv",), server_args=flags).store_dtype
        assert plan(**settings, store_dtype=found).expected(prompts, journal) == {
            "evictions": 3,
            "tokens_evicted": 256 + 288 + 320 - 3 * held,
        }


def test_a_server_without_the_plugin_is_refused(endpoint):
    endpoint.check_eviction_per_request((1, 2))
    Handler.refuses = False
    with pytest.raises(RuntimeError, match="without vllm-kvevict"):
        endpoint.check_eviction_per_request((1, 2))


def test_endpoint(endpoint):
    assert endpoint.model == "served" and endpoint.block_size() == 16
    assert sum(endpoint.metrics("vllm_kvevict:evictions_total").values()) == 7
    assert endpoint.metrics("vllm_kvevict:none") is None
    with pytest.raises(EndpointError, match=r"HTTP 400: /v1/completions.*unknown policy"):
        endpoint.complete((1,), 2, {"kv_eviction": "no-such-policy"})


def test_answers_are_scored_as_prompts(endpoint):
    found = endpoint.score((3, 4, 5), (6, 2), {"kv_eviction": "none"})
    assert found == (-3.0, -1.0)
    (body,) = Handler.seen
    assert body["prompt"] == [3, 4, 5, 6, 2] and body["max_tokens"] == 1
    assert (body["vllm_xargs"], body["prompt_logprobs"]) == ({"kv_eviction": "none"}, 0)


def test_an_answer_may_go_past_its_end(endpoint):
    endpoint.complete((1,), 2, {}, ignore_eos=True)
    endpoint.complete((1,), 2, {})
    assert [body.get("ignore_eos") for body in Handler.seen] == [True, None]


@pytest.mark.parametrize(
    "counted", [{"evictions": 9, "tokens_evicted": 100}, {"evictions": 10, "tokens_evicted": 96}]
)
def test_wrong_counters_fail_the_run(counted, tmp_path):
    run = Run(Options(model=str(tmp_path), like_for_like=True))
    variant = variants(run.options)[0]
    with pytest.raises(RuntimeError, match="not what they say"):
        run.count(variant, {"evictions": 10, "tokens_evicted": 100}, counted)


def test_right_counters(tmp_path):
    run = Run(Options(model=str(tmp_path), like_for_like=True))
    default, pooled = variants(run.options)
    expected = {"evictions": 10, "tokens_evicted": 100}
    run.count(default, expected, expected)
    assert not run.notes
    run.count(pooled, expected, {"evictions": 11, "tokens_evicted": 110})
    assert run.notes == ["server avg5: preempted requests evicted more than once"]
    assert list(pooled.labels) == ["snapkv, avg 5", "ada-snapkv, avg 5"]


def test_a_server_with_shares_of_layers(tmp_path):
    options = Options.parse(["--model", str(tmp_path), "--layers", "auto", "--groups", "5"])
    default, layers = variants(options)
    assert tuple(default.labels) == options.policies and not default.flags
    assert layers.flags == ("--kv-eviction-profile", "auto", "--kv-eviction-options.groups", "5")
    assert layers.labels == {f"{name}, layers": name for name in ("defensive", "ada-defensive")}
    _, few = variants(Options.parse(["--model", str(tmp_path), "--layers", "auto"]))
    more = ["--layers", "auto", "--server-args", "--kv-eviction-options.probe_window none"]
    default, layers = variants(Options.parse(["--model", str(tmp_path), *more]))
    assert layers.flags[-2:] == ("--kv-eviction-options.probe_window", "none")
    assert not default.flags
    assert few.flags == ("--kv-eviction-profile", "auto"), "the server knows how many groups"
    assert len(variants(Options.parse(["--model", str(tmp_path)]))) == 1
    alone = ["--model", str(tmp_path), "--policies", "", "--layers", "auto"]
    (only,) = variants(Options.parse(alone))
    assert only.name == "layers" and only.labels
    with pytest.raises(SystemExit):
        Options.parse([*alone, "--base-url", "http://127.0.0.1:1"])


def test_servers_with_budgets_by_layer_count_each_group():
    """Their number of evicted tokens is that of all groups, which is not compared."""
    assert not Variant("default", (), {"snapkv": "snapkv"}).has_groups
    assert Variant("default", (), {"a": "snapkv", "b": "ada-pyramid"}).has_groups
    assert Variant(LAYERS, (), {"defensive, layers": "defensive"}).has_groups
