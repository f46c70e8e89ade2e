"""Budgets by target in vLLM's real schedulers.

Setup as in ``test_scheduler``: blocks of 8, window 8. A prompt of 300 tokens waits at 288; its
trials compute 12 tokens each, and keep stores of 1, 3, 8 and 17 blocks.
"""

import os
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.engine.aims import share_of
from tests.engine.days import play_until_seen
from tests.engine.harness import Engine
from tests.engine.scenarios import Scenario, aiming, run
from tests.engine.test_scheduler import (
    ASYNC,
    SYNC,
    counters,
    engine,
    evictions,
    hit,
    no_stop,
    tokens,
    used_blocks,
)
from vllm_kvevict.schedule.step_plan import PLAN, StepPlan

LOSES = {"6.25%": 1.0, "12.5%": 0.1, "25%": 0.02, "50%": 0.01}
SERVER = dict(target=0.03, max_batched=512, blocks=240)
BOTH = pytest.mark.parametrize(
    "setup", [replace(one, **SERVER) for one in (SYNC, ASYNC)], ids=["sync", "async"]
)


def loses(nats: dict[str, float]):
    return lambda request_id, so_far: nats[share_of(request_id)]


def serving(setup, nats=None) -> Engine:
    core = engine(setup)
    core.worker.loses = loses(nats or LOSES)
    return core


def kept(core: Engine) -> list[str]:
    """What requests were told, in their order."""
    return [core.answers[request.request_id]["kv_eviction"]["kept"] for request in core.requests]


def all_evictions(core: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while core.scheduler.has_unfinished_requests():
        for request_id, length in evictions(core.step()).items():
            found.setdefault(request_id, []).append(length)
    core.finish()
    return found


@BOTH
@pytest.mark.parametrize(
    "target, share, blocks",
    [(0.03, "25%", 8), (0.1, "12.5%", 3), (2, "6.25%", 1), (0.01, "50%", 17)],
)
def test_the_smallest_that_loses_no_more(setup, target, share, blocks):
    core = serving(setup)
    request = core.add(tokens(300), 100, asked={"kv_eviction_target": target})
    found = all_evictions(core)
    assert found[request.request_id] == [300, 364], "and in decode with the same budget"
    assert core.answers["r0"] == {"kv_eviction": {"kept": share, "kl_nats": LOSES[share]}}
    assert core.invariants.tally.preemptions == 0
    # Store and tail, as of a request that asked for it.
    same = engine(setup)
    same.add(tokens(300), 100, asked={"kv_eviction_budget": share})
    assert all_evictions(same) == {"r0": [300, 364]} and not same.answers
    names = "tokens_evicted", "evictions_prefill", "evictions_decode", "requests_evicted"
    for name in names:
        assert getattr(counters(core), name) == getattr(counters(same), name)
    assert counters(core).trials == 4
    assert blocks < counters(core).store_blocks_allocated


@BOTH
def test_what_counts_is_what_is_made_of_a_trial(setup):
    """Twice what it said, here: a budget more is kept, and told with this loss."""
    core, asked = serving(setup), []

    class Doubled:
        def loss(self, policy: str, share: str, nats: float, salt: str | None) -> float:
            asked.append((policy, salt, share, nats))
            return 2 * nats

    core.scheduler._targets.trials._estimate = Doubled()
    # Those that check ask for no request's own trial.
    core.worker.loses = lambda name, so_far: LOSES[share_of(name)] * (1 + ("r-t" in name))
    core.add(tokens(300), 100).cache_salt = "mine"
    all_evictions(core)
    assert core.answers["r0"] == {"kv_eviction": {"kept": "50%", "kl_nats": 0.02}}
    assert sorted(asked) == sorted((setup.policy, "mine", *one) for one in LOSES.items())


@BOTH
def test_a_request_that_loses_too_much_stays_whole(setup):
    core = serving(setup, dict.fromkeys(LOSES, 1.0))
    core.add(tokens(300), 200)
    assert all(name != "r0" for name in all_evictions(core))
    assert core.answers["r0"] == {"kv_eviction": {"kept": "100%"}}
    assert counters(core).target_100 == counters(core).requests_whole == 1
    assert counters(core).evictions == 0 and counters(core).blocks_freed <= 4


@BOTH
def test_it_waits_before_its_window_and_others_do_not(setup):
    core = serving(setup)
    other = core.add(tokens(20, seed=5), 60, asked={"kv_eviction": "none"})
    core.step()
    core.add(tokens(300), 20)
    lengths = []
    while not evictions(output := core.step()).get("r1"):
        lengths.append(core.requests[1].num_computed_tokens)
        assert output.num_scheduled_tokens["r0"] == 1
    assert lengths.count(288) >= 3 and max(lengths) == 288
    core.finish()
    assert other.num_output_tokens == 60
    assert core.answers.keys() == {"r1"} and core.answers["r1"]["kv_eviction"]["kept"] == "25%"


@BOTH
def test_what_it_computes_again(setup):
    """Trials take its blocks, and vLLM counts none of their look-ups."""
    core = serving(setup)
    core.add(tokens(300), 20)
    found = {}
    while core.scheduler.has_unfinished_requests():
        output = core.step()
        found |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    trials = {name: found[name] for name in found if "-target-" in name and "-audit-" not in name}
    assert set(trials.values()) == {288} and len(trials) == 4
    # The window, whole blocks before it, and the one token that ends it; then its replay.
    assert counters(core).tokens_tried == 4 * (12 + 1 + 8)
    core.finish()


@BOTH
def test_a_prompt_in_the_cache_waits_as_well(setup):
    core = serving(setup)
    core.add(tokens(300), 20, asked={"kv_eviction": "none"})
    core.finish()
    core.add(tokens(300), 20)
    assert hit(core.step(), core.requests[1]) == 280, "less the block that admits it"
    core.finish()
    assert core.answers["r1"]["kv_eviction"]["kept"] == "25%"


@BOTH
def test_it_is_known_the_next_time(setup):
    core = serving(setup)
    first = core.add(tokens(300), 20)
    core.finish()
    core.add(tokens(300), 20)
    assert evictions(core.step()) == {"r1": 300}
    core.finish()
    assert kept(core) == ["25%", "25%"] and counters(core).trials == 4
    core.add(tokens(300), 20, asked={"kv_eviction_target": 0.2})
    core.add(tokens(300), 20, cache_salt="another tenant")
    core.finish()
    assert kept(core)[2:] == ["12.5%", "25%"] and counters(core).trials == 4 + 2 * 4
    core.reset()
    core.add(tokens(300), 20)
    core.finish()
    assert counters(core).trials == 16, "weights may have changed"
    assert first.num_output_tokens == 20


@BOTH
def test_a_point_finds_the_store_of_its_budget(setup):
    core = serving(setup)
    for seed in (1, 2, 3):
        core.add(tokens(300) + tokens(30, seed), 10, asked={"kv_eviction_at": 300})
        core.finish()
    assert kept(core) == ["25%"] * 3 and counters(core).trials == 4
    assert counters(core).stores_published == 1 and counters(core).stores_reused == 2


@BOTH
def test_one_ladder_serves_all_who_ask_the_same(setup):
    core = serving(setup)
    for _ in range(4):
        core.add(tokens(300), 20)
    core.add(tokens(300, seed=1), 20)
    core.finish()
    assert kept(core) == ["25%"] * 5 and counters(core).trials <= 8


@BOTH
def test_who_asks_the_same_goes_on_when_the_first_is_gone(setup):
    core = serving(setup)
    first = core.add(tokens(300), 20)
    core.add(tokens(300), 20)
    while not counters(core).trials:
        core.step()
    core.abort(first)
    core.finish()
    assert core.answers["r1"]["kv_eviction"]["kept"] == "25%" and "r0" not in core.answers


@BOTH
def test_nothing_is_left_of_a_request_that_goes_away(setup):
    core = serving(setup)
    core.add(tokens(300), 20)
    while not core.worker.evictions:
        core.step()
    core.abort(core.requests[0])
    core.step()
    assert not [name for name in core.scheduler.requests if "-audit-" not in name]
    core.finish()


@BOTH
def test_a_value_for_a_request_that_has_just_gone(setup):
    """Its first trial, which would be enough, is heard in the step in which it is aborted."""
    core = serving(replace(setup, max_num_seqs=2), dict.fromkeys(LOSES, 0.0))
    core.add(tokens(300) + tokens(20, 1), 20, asked={"kv_eviction_at": 300})
    while not getattr(core.schedule(), PLAN, StepPlan()).compared:
        core.settle()
    core.abort(core.requests[0])
    core.finish()
    assert not core.answers and not core.scheduler._table.stopping
    assert counters(core).target_6_25 == 0


@BOTH
def test_a_reset_begins_its_trials_anew(setup):
    core = serving(setup)
    core.add(tokens(300), 20)
    while not core.worker.evictions:
        core.step()
    core.reset()
    core.finish()
    assert kept(core) == ["25%"] and counters(core).trials > 4


@BOTH
def test_places_are_kept_for_trials(setup):
    """As many at once as vLLM runs: they would all wait for a place."""
    core = serving(replace(setup, max_num_seqs=4, blocks=900))
    for seed in range(12):
        core.add(tokens(300, seed), 30)
    core.finish()
    assert kept(core) == ["25%"] * 12


@BOTH
def test_one_request_at_a_time_has_no_trials(setup):
    core = serving(replace(setup, max_num_seqs=1))
    core.add(tokens(300), 20)
    core.add(tokens(300, 1), 20)
    core.finish()
    assert kept(core) == ["short"] * 2
    assert counters(core).trials == 0 and counters(core).requests_evicted == 2


@BOTH
def test_without_memory_it_takes_the_servers_budget(setup):
    core = serving(replace(setup, blocks=42))
    core.add(tokens(300), 20)
    assert all_evictions(core) == {"r0": [300]}
    assert kept(core) == ["short"] and counters(core).target_short == 1
    assert counters(core).tokens_evicted == 288 - 8 * 4, "that of the server: 40 tokens"


@BOTH
def test_it_waits_a_while_for_memory(setup):
    core = serving(setup)
    core.add(tokens(20, seed=5), 150, asked={"kv_eviction": "none"})
    core.step()
    core.hold(free=42)
    core.add(tokens(300), 20)
    for _ in range(20):
        core.step()
    assert core.requests[1].num_computed_tokens == 288 and not counters(core).trials
    core.release()
    core.finish()
    assert core.answers["r1"]["kv_eviction"]["kept"] == "25%"


@BOTH
def test_trials_make_way_for_clients(setup):
    """Others grow while trials hold the last blocks: nobody else is preempted."""
    core = serving(replace(setup, interval=0, max_num_seqs=16))
    for seed in range(8):
        # One of them takes a block in each step.
        core.add(tokens(20 + seed, seed=5 + seed), 150, asked={"kv_eviction": "none"})
    core.step()
    core.add(tokens(300), 20)
    while not core.worker.evictions:
        core.step()
    core.hold(free=0)
    for _ in range(9):
        core.step()
    assert core.invariants.tally.preemptions == 0, "what trials held was enough"
    core.release()
    core.finish()


@BOTH
def test_values_may_be_late(setup):
    """A GPU hands them over with a later step, also when nothing else runs."""
    core = serving(setup)
    core.add(tokens(300), 20)
    late, execute = [], core.worker.execute

    def held_back(output):
        sampled = execute(output)
        late.append(core.worker.audits)
        core.worker.audits = late.pop(0) if len(late) > 12 else []
        return sampled

    core.worker.execute = held_back
    for _ in range(40):
        if core.scheduler.has_unfinished_requests():
            core.step()
    core.worker.execute = execute
    core.finish()
    assert kept(core) == ["25%"]


@BOTH
def test_larger_budgets_end_when_a_smaller_one_will_do(setup):
    core = serving(replace(setup, max_num_seqs=3), dict.fromkeys(LOSES, 0.0))
    core.add(tokens(300), 20)
    core.finish()
    assert kept(core) == ["6.25%"] and counters(core).trials < 4


@BOTH
def test_audits_of_clients_are_their_own(setup):
    core = Engine(replace(setup, audit=1.0), no_stop, log_stats=True)
    core.worker.loses = lambda name, so_far: loses(LOSES)(name, so_far) if "-t" in name else 0.5
    core.scheduler._reporter.measured = told = Mock()
    core.scheduler._reporter.chosen = chosen = Mock()
    core.add(tokens(300), 30)
    core.finish()
    audits = [one for call in told.call_args_list for one in call.kwargs["audits"]]
    assert [(one[0], one[3]) for one in audits] == [("r0", 0.5)]
    chosen.assert_called_once_with(0.02)
    assert counters(core).tokens_audited == 8 and counters(core).audits_dropped == 0


@BOTH
@pytest.mark.parametrize(
    "length, asked",
    [
        (14, {}),
        (300, {"kv_eviction_budget": 64}),
        (300, {"kv_eviction": "h2o"}),
        (300, {"kv_eviction_when": "pressure"}),
        (300, {"kv_eviction_prefill_interval": 64}),
        (300, {"kv_eviction": "none"}),
    ],
)
def test_who_has_no_target(setup, length, asked):
    core = serving(setup)
    core.add(tokens(length), 20, asked=asked)
    core.finish()
    assert counters(core).trials == 0 and not core.answers


def test_the_last_token_needs_no_budget():
    core = serving(replace(SYNC, **SERVER))
    core.add(tokens(300), 1)
    core.finish()
    assert counters(core).trials == 0 and used_blocks(core) == 0


@pytest.mark.slow
def test_no_block_is_lost_where_budgets_are_tried():
    """Random days: all that holds without a target, no client gives way to a trial, every request
    ends, and comes to the smallest budget that would do."""
    totals: Counter[str] = Counter()

    def accounting(scenario: Scenario) -> None:
        run(aiming(scenario), totals)

    names = """
        kept_6.25% kept_12.5% kept_25% kept_50% kept_100% kept_short trials preemptions aborts
        resets evictions_decode evictions_at_point tokens_audited stores_published taken
    """.split()
    steps = int(os.environ.get("KVEVICT_STEPS", "6000"))
    play_until_seen(accounting, max(1, steps // 400), totals, names)
