"""What audits report is what the masked oracle says of the same evictions, and changes no token."""

import json

import pytest

from tests import forked
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine
from tests.oracles.masked import Kept, Life, MaskedModel, check_tokens
from tests.profiles import random_profile
from vllm_kvevict.config.names import LEARNED, POLICIES

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 60)]
NEW_TOKENS = 100
OPTIONS = dict(enable_prefix_caching=True, disable_log_stats=False, max_num_batched_tokens=256)
WINDOW = 32


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def serving(model, settings, **options):
    return engine(model, dict(interval=32) | settings, **OPTIONS | options)


def listen(run):
    """What the engine core is told of audits, in order."""
    found, measured = [], run.scheduler._reporter.measured

    def noted(**values):
        found.extend(values.get("audits", ()))
        measured(**values)

    run.scheduler._reporter.measured = noted
    return found


def expected(oracle, tokens, lives, window=WINDOW):
    """Nats and agreement of every eviction of a request: its last tokens before it and after."""
    found = []
    for life in lives:
        former: list[Kept] = []
        for kept in life.evictions:
            start = max(kept.n - window, kept.tail_start)
            now = Kept(start, kept.tail_start, kept.positions)
            before, after = (
                oracle.predictions(tokens[: kept.n], Life(start + 1, evictions)).log_softmax(-1)
                for evictions in ([*former], [*former, now])
            )
            nats = (before.exp() * (before - after)).sum(-1).mean()
            agreed = (before.argmax(-1) == after.argmax(-1)).float().mean()
            found.append((float(nats), float(agreed)))
            former.append(kept)
    return found


def assert_told(told, wanted):
    assert len(told) == len(wanted)
    for audit, (nats, agreed) in zip(told, wanted, strict=True):
        assert audit[3] == pytest.approx(nats, rel=1e-3, abs=1e-5)
        assert audit[4] == pytest.approx(agreed, abs=1.5 / WINDOW)


CASES = {
    "ada-snapkv": dict(policy="ada-snapkv", budget=96),
    "a policy without a window": dict(policy="streaming-llm", budget=96),
    "groups": dict(policy="pyramidkv", budget=128, options=dict(groups=2)),
    "sums of attention": dict(policy="h2o", budget=96),
    "ada-defensive": dict(policy="ada-defensive", budget="25%"),
    "draws": dict(policy="nacl", budget=96),
}
AUDITED = [name for name in POLICIES if name != "subgen-stream"]


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv"))
def test_it_is_what_the_oracle_says(tiny_model, oracle, case):
    settings = CASES[case] | dict(audit="100%")
    with serving(tiny_model, settings) as run:
        free, told = run.free_blocks(), listen(run)
        for _ in range(2):  # The second time with prefix hits.
            told.clear()
            outputs = run.generate(PROMPTS, NEW_TOKENS)
            assert len(told) > 6
            for number, prompt in enumerate(PROMPTS):
                mine = [one for one in told if int(one[0].split("-")[0]) % 3 == number]
                lives, output = run.lives()[number], outputs[number]
                assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
                assert_told(mine, expected(oracle, [*prompt, *output], lives))
        assert run.counters.audits_dropped == 0
        assert run.counters.tokens_audited == 2 * len(told) * WINDOW
        assert run.free_blocks() == free


@pytest.mark.parametrize("policy", some(AUDITED))
def test_audits_change_no_token(tiny_model_kv4, tmp_path, policy):
    """Of requests that are drawn, of others, and of prompts that the prefix cache serves."""
    settings = dict(policy=policy, budget=128)
    if policy in LEARNED:
        path, _ = random_profile(tmp_path, tiny_model_kv4)
        settings["profile"] = str(path)
    answers = {}
    for share in (0, "0.0001%", "100%"):
        with serving(tiny_model_kv4, settings | dict(audit=share)) as run:
            told = listen(run)
            answers[share] = [run.generate(PROMPTS, NEW_TOKENS) for _ in range(2)]
            assert run.counters.evictions > 6
            assert bool(told) == (share == "100%")
    assert answers["0.0001%"] == answers[0]
    assert answers["100%"] == answers[0]


def told_of(told, number, count):
    """Audits of the request at this place in the last call of ``generate``."""
    return [one for one in told if int(one[0].split("-")[0]) % count == number]


POINTS = {
    "at a point": dict(kv_eviction_at=250, kv_eviction_interval=0),
    "inside the prompt": dict(kv_eviction_prefill_interval=128, kv_eviction_interval=0),
}


@pytest.mark.parametrize("asked", POINTS.values(), ids=POINTS)
def test_evictions_before_the_end_of_the_prompt(tiny_model, oracle, asked):
    prompts = PROMPTS[:2]
    with serving(tiny_model, CASES["ada-snapkv"] | dict(audit=1)) as run:
        told = listen(run)
        outputs = run.generate(prompts, 20, [asked] * 2)
        dropped = run.counters.audits_dropped
        assert len(told) >= 2
        found = 0
        for number, prompt in enumerate(prompts):
            lives = run.lives()[number]
            assert check_tokens(oracle, prompt, outputs[number], lives) == (20, 20)
            wanted = expected(oracle, [*prompt, *outputs[number]], lives)
            found += len(wanted)
            # Evictions that follow too soon are left out.
            for audit in told_of(told, number, 2):
                assert any(
                    audit[3] == pytest.approx(nats, rel=1e-3, abs=1e-5) for nats, _ in wanted
                )
        assert len(told) + dropped == found


def test_a_policy_that_protects_fewer_tokens_than_the_window(tiny_model_kv4, tmp_path):
    """Under probe the last 8 tokens stay: what is replayed begins behind the store."""
    path, _ = random_profile(tmp_path, tiny_model_kv4)
    oracle = MaskedModel(tiny_model_kv4)
    settings = dict(policy="ada-probe", budget=288, profile=str(path), audit="100%")
    prompt = random_prompt(600, seed=3)
    with serving(tiny_model_kv4, settings) as run:
        told = listen(run)
        (output,) = run.generate([prompt], 60)
        (lives,) = run.lives()
        assert check_tokens(oracle, prompt, output, lives) == (60, 60)
        assert run.counters.tokens_audited < len(told) * WINDOW
        assert_told(told, expected(oracle, [*prompt, *output], lives))


def test_only_a_share_is_drawn(tiny_model):
    prompts = [random_prompt(200, seed=seed) for seed in range(40)]
    with serving(tiny_model, CASES["ada-snapkv"] | dict(audit="25%", interval=0)) as run:
        told = listen(run)
        run.generate(prompts, 4)
        assert run.counters.evictions == 40
        assert 1 <= len({audit[0] for audit in told}) <= 24


def test_it_gives_way_where_memory_is_short(tiny_model, oracle):
    """A pool for two prompts: replays that do not fit are dropped, and nobody waits for them."""
    prompts = [random_prompt(440, seed=seed) for seed in range(6)]
    short = dict(num_gpu_blocks_override=36, max_model_len=1024, max_num_seqs=6)
    with serving(tiny_model, CASES["ada-snapkv"] | dict(audit="100%"), **short) as run:
        free, told = run.free_blocks(), listen(run)
        outputs = run.generate(prompts, 70)
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (70, 70)
        assert len(told) + run.counters.audits_dropped == run.counters.evictions
        assert told and run.free_blocks() == free


@pytest.mark.nightly
def test_drafts(tiny_model):
    """In a process of its own: with numba, which n-gram drafts load, vLLM 0.32 starts no second
    engine in one."""
    done = forked.run("tests.e2e.audit_script", tiny_model)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["audits"] > 4


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (dict(enable_prefix_caching=False), "--no-enable-prefix-caching"),
        (dict(disable_log_stats=True), "--disable-log-stats"),
    ],
)
def test_where_it_cannot_run_it_says_so(tiny_model, options, flag):
    settings = CASES["ada-snapkv"] | dict(audit="1%")
    with (
        pytest.raises(ValueError, match=f"--kv-eviction-audit .*{flag}"),
        serving(tiny_model, settings, **options),
    ):
        pass
