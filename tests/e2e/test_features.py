"""What requests can ask for, under eviction: stops, log-probabilities, n, grammars, dtypes."""

import json
import re

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.architectures import log_probabilities
from tests.e2e.conftest import run_stock
from tests.e2e.stock_script import EVICTION, PROMPT, prompt_logprobs
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

OTHER = random_prompt(333, seed=333)
NEW_TOKENS = 100
GREEDY = dict(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture(scope="module", params=[nightly(False), True], ids=["", "prefix-caching"])
def run(tiny_model, request):
    grammars = dict(backend="xgrammar", disable_any_whitespace=True)
    with engine(
        tiny_model,
        dict(EVICTION, shared_blocks="evict"),
        enable_prefix_caching=request.param,
        structured_outputs_config=grammars,
    ) as run:
        free = run.free_blocks()
        yield run
        assert run.free_blocks() == free


@pytest.fixture
def evicting(run):
    """The engine, for a test that must see evictions in prefill and in decode."""
    counters = run.counters
    before = counters.evictions_prefill, counters.evictions_decode
    yield run
    assert counters.evictions_prefill > before[0] and counters.evictions_decode > before[1]


def complete(run, prompt=PROMPT, **params):
    """The completions of one request; its lives are in the recorder."""
    run.recorder.lives.clear()
    settings = SamplingParams(**GREEDY | params)
    return run.llm.generate([dict(prompt_token_ids=prompt)], settings, use_tqdm=False)[0].outputs


def test_stop_string(evicting):
    whole = complete(evicting)[0]
    words = [word for word in whole.text[len(whole.text) * 2 // 3 :].split() if len(word) > 2]
    stop = next(word for word in words if word.isascii())
    stopped = complete(evicting, stop=[stop])[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
    assert stopped.text == whole.text[: whole.text.index(stop)]
    length = len(stopped.token_ids)
    assert list(stopped.token_ids) == list(whole.token_ids)[:length]


def test_stop_token(evicting):
    tokens = list(complete(evicting)[0].token_ids)
    stop = tokens[70]
    stopped = complete(evicting, stop_token_ids=[stop])[0]
    assert list(stopped.token_ids) == tokens[: tokens.index(stop) + 1]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == stop


def test_logprobs_of_sampled_tokens(evicting, oracle):
    answer = complete(evicting, logprobs=5)[0]
    tokens = list(answer.token_ids)
    life = evicting.lives()[0][0]
    assert len(life.evictions) >= 3
    expected = log_probabilities(oracle, PROMPT, tokens, life)
    for row, entry in zip(expected, answer.logprobs, strict=True):
        ranked = sorted(entry, key=lambda token: entry[token].rank)
        assert ranked == row.topk(5).indices.tolist()
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)
    full = log_probabilities(oracle, PROMPT, tokens, Life(len(PROMPT)))
    assert (full - expected).abs().max() > 0.1, "the oracle would not notice an eviction"


def test_prompt_logprobs_are_those_of_stock_vllm(run, stock):
    evictions = run.counters.evictions
    actual = prompt_logprobs(run.llm, PROMPT)
    assert run.counters.evictions == evictions + 1
    assert len(actual) == len(PROMPT) - 1
    for entry, expected in zip(actual, stock["prompt_logprobs"], strict=True):
        assert [token for token, _ in entry] == [token for token, _ in expected]
        assert [p for _, p in entry] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_next_turn(evicting, oracle):
    """Nothing that was computed over an evicted cache is taken for the next turn's prefix."""
    first = evicting.generate([PROMPT], NEW_TOKENS)[0]
    prompt = [*PROMPT, *first, *OTHER[:20]]
    second = evicting.generate([prompt], NEW_TOKENS)[0]
    (life,) = evicting.lives()[0]
    assert life.prefill_end == len(prompt) and len(life.evictions) >= 3
    assert check_tokens(oracle, prompt, second, [life]) == (NEW_TOKENS, NEW_TOKENS)


def test_n_with_seed(evicting):
    sampling = dict(temperature=0.8, seed=7)
    together = complete(evicting, n=3, **sampling)
    assert len({answer.token_ids for answer in map(freeze, together)}) == 3
    for index, answer in enumerate(together):
        # vLLM seeds the i-th of n with seed + i.
        alone = complete(evicting, **sampling | dict(seed=7 + index))[0]
        assert list(answer.token_ids) == list(alone.token_ids)


@pytest.mark.parametrize("count", [1, 3])
def test_one_token_is_not_worth_an_eviction(run, oracle, count):
    evictions = run.counters.evictions
    outputs = run.generate([PROMPT, OTHER][:count], 1)
    for prompt, output in zip([PROMPT, OTHER], outputs, strict=False):
        assert check_tokens(oracle, prompt, output, [Life(len(prompt))]) == (1, 1)
    assert run.counters.evictions == evictions
    complete(run, max_tokens=2)
    assert run.counters.evictions == evictions + 1


LETTERS = 200
GRAMMAR = StructuredOutputsParams(regex=rf"[a-z ]{{{LETTERS}}}")
SCHEMA = StructuredOutputsParams(
    json=dict(type="array", items=dict(type="string", pattern="^[a-z]{12}$"), minItems=20,
              maxItems=20)
)  # fmt: skip
FREE = dict(max_tokens=400, ignore_eos=False)


def test_structured_output_takes_the_best_allowed_token(evicting, oracle):
    answer = complete(evicting, structured_outputs=GRAMMAR, **FREE)[0]
    check_letters(evicting, oracle, answer)


def check_letters(run, oracle, answer):
    """Of a grammar of 200 letters and blanks: at every token, what the oracle prefers of them."""
    left = LETTERS
    assert re.fullmatch(rf"[a-z ]{{{left}}}", answer.text)
    tokenizer = run.llm.get_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(1024)]
    tokens = list(answer.token_ids)[:-1]  # without the end of the text
    rows = log_probabilities(oracle, PROMPT, tokens, run.lives()[0][0])
    for token, row in zip(tokens, rows, strict=True):
        allowed = [t for t, text in enumerate(texts) if re.fullmatch(rf"[a-z ]{{1,{left}}}", text)]
        assert row[token] == max(row[allowed])
        left -= len(texts[token])
    assert left == 0


def test_structured_output_json(evicting):
    check_items(complete(evicting, structured_outputs=SCHEMA, **FREE)[0])


def check_items(answer):
    items = json.loads(answer.text)
    assert len(items) == 20 and all(re.fullmatch("[a-z]{12}", item) for item in items)


def freeze(answer):
    answer.token_ids = tuple(answer.token_ids)
    return answer


def test_bfloat16(tiny_model):
    with engine(tiny_model, EVICTION, dtype="bfloat16") as run:
        free = run.free_blocks()
        outputs = [run.generate([PROMPT, OTHER], NEW_TOKENS) for _ in range(2)]
        assert outputs[0] == outputs[1]
        assert run.counters.evictions_prefill == 4 and run.counters.evictions_decode >= 8
        params = SamplingParams(logprobs=1, **GREEDY)
        answer = run.llm.generate([dict(prompt_token_ids=PROMPT)], params, use_tqdm=False)[0]
        values = [p.logprob for entry in answer.outputs[0].logprobs for p in entry.values()]
        assert all(-50 < value <= 0 for value in values)
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_priority_scheduling(tiny_model, oracle):
    """Urgent requests push running ones out: these are recomputed and evict anew."""
    # Tails grow for 160 steps, to more than the pool holds for all that were admitted.
    eviction, new_tokens = dict(EVICTION, interval=160), 400
    with engine(
        tiny_model, eviction, scheduling_policy="priority", num_gpu_blocks_override=34,
        max_model_len=1024, max_num_seqs=6,
    ) as run:  # fmt: skip
        free = run.free_blocks()
        prompts = [random_prompt(380 + n, seed=n) for n in range(6)]
        requests = [dict(prompt_token_ids=prompt) for prompt in prompts]
        finished: list[int] = []
        preempted: list[str] = []
        preempt = run.scheduler._preempt_request
        run.scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            preempt(request, *a, **k),
        )[1]
        free_request = run.scheduler._free_request
        run.scheduler._free_request = lambda request, *a, **k: (
            finished.append(int(request.request_id.split("-")[0])),
            free_request(request, *a, **k),
        )[1]
        outputs = run.llm.generate(
            requests,
            SamplingParams(**dict(GREEDY, max_tokens=new_tokens)),
            use_tqdm=False,
            priority=[5, 4, 3, 2, 1, 0],
        )
        assert preempted
        assert finished[0] == 5, "the most urgent one came last and ends first"
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            tokens = list(output.outputs[0].token_ids)
            agreed, total = check_tokens(oracle, prompt, tokens, lives)
            assert agreed == total == new_tokens
        assert run.counters.evictions_prefill >= 6 and run.counters.evictions_decode >= 6
        assert run.free_blocks() == free


def test_inert_until_asked(tiny_model, stock):
    """vLLM's own log, tokens and metrics; then asked for eviction in the same process."""
    result, log = run_stock(tiny_model, "then-evict")
    assert len(messages(log)) > 10
    assert messages(log) <= messages(stock["log"])
    assert result["tokens"] == stock["tokens"]
    assert result["prompt_logprobs"] == stock["prompt_logprobs"]
    assert result["metrics"].keys() == stock["metrics"].keys()
    assert result["metrics"]["vllm:generation_tokens_total"] > 100
    assert not any("kvevict" in name for name in result["metrics"])
    assert result["evictions"] == result["metrics_then"]["vllm_kvevict:evictions_total"] >= 4
    assert result["agreed"] == [100, 100]


def messages(log: str) -> set[str]:
    """The log's lines without what differs between runs: figures and names of files."""
    return {re.sub(r"vllm_dist_\w+|[\d.]+", "#", line) for line in log.splitlines() if line.strip()}
