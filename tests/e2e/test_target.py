"""A request with a target answers as one that asked for the budget which the target came to."""

import json
from contextlib import contextmanager
from typing import Any

import pytest
from pytest import approx

from tests import forked
from tests.engine.aims import Told
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 700)]
NEW_TOKENS = 60
OPTIONS = dict(enable_prefix_caching=True, disable_log_stats=False, max_num_batched_tokens=256)
RUNGS = ("6.25%", "12.5%", "25%", "50%")


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def serving(model, settings, **options):
    return engine(model, dict(interval=32, target=0.03) | settings, **OPTIONS | options)


def answers(run, asked: list[dict[str, Any]], prompts=PROMPTS, new_tokens=NEW_TOKENS):
    """Tokens of every prompt, and what each request is told that it came to."""
    told: list[Any] = []
    generate = run.llm.generate

    def noted(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        told.extend((one.kv_transfer_params or {}).get("kv_eviction") for one in outputs)
        return outputs

    run.llm.generate = noted
    try:
        return run.generate(prompts, new_tokens, asked), told
    finally:
        run.llm.generate = generate


def said(run) -> dict[str, dict[str, float]]:
    """What trials say, by request and budget, as they say it; they are taken at their word."""
    found: dict[str, dict[str, float]] = {}
    heard = run.scheduler._targets.heard

    def noted(request_id, nats):
        client, _, rest = request_id.partition("-target-")
        found.setdefault(client.split("-")[0], {})[rest.split("-")[0]] = nats
        heard(request_id, nats)

    run.scheduler._targets.heard = noted
    run.scheduler._targets.trials._estimate = Told()
    return found


CASES = {
    "ada-snapkv": dict(policy="ada-snapkv"),
    "ada-defensive": dict(policy="ada-defensive"),
    "a policy without a window": dict(policy="streaming-llm"),
    "groups": dict(policy="pyramidkv", options=dict(groups=2)),
    "draws": dict(policy="nacl"),
    "evict": dict(policy="snapkv", shared_blocks="evict"),
}


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv"))
def test_its_tokens_are_those_of_its_budget(tiny_model, oracle, case):
    with serving(tiny_model, CASES[case] | dict(allow="none")) as run:
        assert run.scheduler._targets.trials._estimate.loss("snapkv", "25%", 0.4) == approx(0.6)
        free, trials = run.free_blocks(), said(run)
        for where in ({}, {"kv_eviction_at": -60}):
            check_tokens_at(run, oracle, where, trials)
            assert run.free_blocks() == free
        counters = run.counters
        assert counters.target_100 == 6 and counters.target_short == 0
        assert counters.trials >= 2 * (3 + 3 + 4) and counters.tokens_tried > 64 * counters.trials
        assert counters.audits_dropped == 0 == counters.tokens_audited


def check_tokens_at(run, oracle, where, trials):
    """Targets wider than any loss, of none, and between what two budgets lose."""
    wide, told = answers(run, [where | {"kv_eviction_target": 1e9}] * 3)
    shares = [one["kept"] for one in told]
    assert shares == ["12.5%", "12.5%", "6.25%"]
    trials.clear()
    none, told = answers(run, [where | {"kv_eviction_target": 0}] * 3)
    assert told == [{"kept": "100%"}] * 3 and not any(v[0].evictions for v in run.lives())
    loses = [trials[request] for request in sorted(trials, key=int)]
    between = [sorted(mine.values())[1] * (1 + 1e-6) for mine in loses]
    asked = [where | {"kv_eviction_target": nats} for nats in between]
    some_of, told = answers(run, asked)
    for mine, one, nats, output, lives, prompt in zip(
        loses, told, between, some_of, run.lives(), PROMPTS, strict=True
    ):
        passing = [share for share in RUNGS if mine.get(share, 1e9) <= nats]
        assert one["kept"] == passing[0]
        assert one["kl_nats"] == approx(mine[one["kept"]], rel=1e-3)
        assert lives[-1].evictions
        assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
    budgets = [where | {"kv_eviction_budget": one["kept"]} for one in told]
    assert answers(run, budgets) == (some_of, [None] * 3)
    own = [where | {"kv_eviction_budget": share} for share in shares]
    assert answers(run, own)[0] == wide
    assert answers(run, [{"kv_eviction": "none"}] * 3)[0] == none
    # The same again is known, and needs no trial.
    before = run.counters.trials
    again, known = answers(run, asked)
    assert again == some_of and known == told and run.counters.trials == before


@contextmanager
def squeezed(run, left: int, times: int):
    """From the twentieth token of everybody on all free blocks but some are taken.

    Again when a request has gone down, until as many have; then they are given back.
    """
    pool, schedule = run.scheduler.kv_cache_manager.block_pool, run.scheduler.schedule
    taken: list[Any] = []
    last = run.counters.target_lowered + times

    def scheduled(*args, **kwargs):
        running = run.scheduler.running
        settled = run.scheduler._targets.stairs.settled.values()
        quiet = len(running) == len(PROMPTS) and not any(one.gain for one in settled)
        decode = all(request.num_output_tokens > 20 for request in running)
        if quiet and decode and run.counters.target_lowered < last:
            taken.extend(pool.get_new_blocks(max(0, pool.get_num_free_blocks() - left)))
        elif run.counters.target_lowered >= last:
            pool.free_blocks(taken)
            taken.clear()
        return schedule(*args, **kwargs)

    run.scheduler.schedule = scheduled
    yield
    run.scheduler.schedule = schedule
    assert not taken
    assert run.counters.target_lowered >= last


DOWN = ("ada-snapkv", "streaming-llm", "ada-defensive")


@pytest.mark.parametrize("policy", some(DOWN, "ada-snapkv"))
def test_its_tokens_are_those_of_what_it_goes_down_to(tiny_model, oracle, policy):
    """Two that are whole go down in decode, one of them twice; then one at half its tokens."""
    with serving(tiny_model, dict(policy=policy)) as run:
        free, trials = run.free_blocks(), said(run)
        run.generate(PROMPTS, 2, [{"kv_eviction_target": 0}] * 3)
        loses = [trials[request] for request in sorted(trials, key=int)]
        for times, part in ((3, 2), (1, 1000)):
            # Of the others' loss at most five times this, or nothing that any budget loses.
            nats = [loses[0]["50%"], *(min(mine.values()) / part for mine in loses[1:])]
            asked = [{"kv_eviction_target": one * (1 + 1e-6)} for one in nats]
            with squeezed(run, left=3, times=times):
                outputs, told = answers(run, asked, new_tokens=200)
            kept, lives = [one["kept"] for one in told], run.lives()
            evictions = [[one.n for one in life.evictions] for (life,) in lives]
            if part == 2:
                assert kept[0] == "50%" != kept[2] != "100%" and len(evictions[2]) >= 2
            else:
                assert kept == ["25%", "100%", "100%"] and not any(evictions[1:])
            assert run.scheduler.eviction_counters.target_short == 0
            for output, life, prompt in zip(outputs, lives, PROMPTS, strict=True):
                assert check_tokens(oracle, prompt, output, life) == (200, 200)
            assert run.free_blocks() == free


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, dict(enable_prefix_caching=False), "--kv-eviction-target .*--no-enable-prefix-cach"),
        (dict(policy="h2o"), {}, "--kv-eviction-target tries budgets, and those of h2o"),
        (dict(when="pressure"), {}, "--kv-eviction-when pressure or it"),
    ],
)
def test_where_it_cannot_run_it_says_so(tiny_model, settings, options, message):
    with (
        pytest.raises(ValueError, match=message),
        serving(tiny_model, dict(policy="snapkv") | settings, **options),
    ):
        pass


@pytest.mark.nightly
def test_two_ranks(tiny_model_kv4):
    """Each rank has half of the vocabulary and of the heads: they come to what one comes to."""
    done = forked.run("tests.e2e.target_script", tiny_model_kv4, "2")
    assert done.returncode == 0, done.stderr[-4000:]
    alone = forked.run("tests.e2e.target_script", tiny_model_kv4, "1")
    # Executors may write behind it.
    lines = [each.stdout.splitlines() for each in (done, alone)]
    two, one = (json.loads(next(x for x in mine if x.startswith("{"))) for mine in lines)
    assert two == one and {kept["kept"] for kept in one["told"]} != {"short"}
