"""Conversations whose turns continue from what the turns before kept.

Blocks of 8, window 8, budget 40: a store of 4 blocks. Evictions every 32 tokens come at 72, 104,
136 and so on, in prompts and in answers.
"""

from dataclasses import replace
from itertools import takewhile

import pytest

from tests.engine.cases import (
    ASYNC,
    BOTH,
    SYNC,
    counters,
    engine,
    evictions,
    hit,
    lose,
    tokens,
    used_blocks,
)
from tests.engine.harness import Engine, Setup
from tests.engine.test_own_settings import walk
from tests.nightly import covering, nightly
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import PLAN

POINTS = range(72, 2000, 32)


def conversations(setup: Setup, **changes) -> Engine:
    return engine(replace(setup, **(dict(every=32, max_batched=512, blocks=200) | changes)))


def say(core: Engine, former, more: int, max_tokens: int = 20, seed: int = 77, **options):
    """The next turn: all that was said, and ``more`` tokens."""
    prompt = list(former.all_token_ids) + tokens(more, seed)
    return core.add(prompt, max_tokens, **options)


@BOTH
def test_a_prompt_is_admitted_by_what_it_holds_at_once(setup):
    """A quarter of 400 tokens and what comes between two evictions are 17 blocks; the prompt has
    50."""
    core = conversations(setup, budget="25%", max_batched=64)
    core.add(tokens(200), 60)
    while not core.requests[0].num_output_tokens:
        core.step()
    core.hold(34)
    second, ran = core.add(tokens(400, 1), 20), []
    output = core.step()
    assert second.request_id in output.num_scheduled_tokens
    while not second.is_finished():
        ran += [at for request, at in evictions(output).items() if request == second.request_id]
        output = core.step()
    core.settle()
    assert second.num_output_tokens == 20 and not second.num_preemptions
    assert ran == [point for point, _, _ in core.invariants.expected.chain(0, second)]
    assert len(ran) == 12
    core.release()
    core.finish()


@BOTH
@pytest.mark.parametrize("chunk, prompt", covering([7, 30, 512], [40, 71, 72, 73, 168]))
def test_evicts_at_the_same_positions_in_prompts_and_answers(setup, chunk, prompt):
    core = conversations(setup, max_batched=chunk)
    core.add(tokens(prompt), 100)
    assert walk(core) == [point for point in POINTS if point < prompt + 99]
    assert counters(core).postponed == 0


@BOTH
@pytest.mark.parametrize("needs_window", [True, False])
def test_a_turn_computes_only_what_is_new(setup, needs_window):
    core = conversations(setup, needs_window=needs_window)
    former = core.add(tokens(150), 60)
    core.finish()
    for turn in range(5):
        former, before = say(core, former, 30), former.num_tokens
        computed = before - hit(core.step(), former)
        # The last token was never computed, and the window of the next eviction is computed anew.
        assert computed <= 8 + 1 + 8 + 8, turn
        core.finish()
    assert counters(core).stores_reused == 5


def reused_at(core: Engine) -> list[int]:
    """Points of the stores in the pool that are intact, in order."""
    stores = core.scheduler._stores
    return sorted(key.point for key in stores._published if stores.has(key))


@BOTH
def test_a_turn_starts_with_the_deepest_store_that_is_left(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    core.finish()
    assert reused_at(core) == [72, 104, 136, 168, 200]
    published = core.scheduler._stores._published
    pool = core.scheduler.kv_cache_manager.block_pool
    for last in (200, 168, 136):
        gone = [store for key, store in published.items() if key.point >= last]
        pool.evict_blocks({block.block_id for one in gone for block in one.groups[0].store})
        second = say(core, former, 30, 4)
        found = hit(core.step(), second)
        assert last - 32 <= found < last
        core.abort(second)
        core.settle()


@BOTH
def test_branches_of_one_conversation_share_what_they_have_in_common(setup):
    core = conversations(setup, max_batched=64)
    former = core.add(tokens(150), 60)
    core.finish()
    branches = [say(core, former, 40, 40, seed=seed) for seed in range(4)]
    core.finish()
    again = [say(core, branch, 10, 4, seed=9) for branch in branches]
    computed: dict[str, int] = {}
    while core.scheduler.has_unfinished_requests():
        for new in (output := core.step()).scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        del output
    core.finish()
    for branch, turn in zip(branches, again, strict=True):
        assert computed[turn.request_id] >= branch.num_tokens - 32
    assert core.invariants.tally.taken_later >= 8


@pytest.mark.nightly
@BOTH
def test_five_hundred_branches_of_one_conversation(setup):
    core = conversations(setup, blocks=400, max_num_seqs=16)
    former = core.add(tokens(200), 40)
    core.finish()
    lose(core)
    for seed in range(500):
        say(core, former, 20, 2, seed=seed)
    core.finish()
    # The first one computes what they have in common, and the others wait for it.
    assert counters(core).stores_reused == 499
    assert counters(core).tokens_reused >= 499 * 200


def test_an_eviction_that_ran_late_is_no_store_of_the_chain():
    """Three answers share one ring of queries, and a scheduler that is a step ahead does not know
    the tokens of a position when its eviction is put off."""
    core = conversations(ASYNC, rings=1)
    requests = [core.add(tokens(150, index), 120) for index in range(3)]
    ran: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.scheduler.has_unfinished_requests():
        for request_id, at in evictions(core.step()).items():
            ran[request_id].append(at)
    core.finish()
    assert counters(core).postponed_ring > 0
    late = []
    for request in requests:
        pairs = zip(ran[request.request_id], POINTS, strict=False)
        in_time = [at for at, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if 0 < len(in_time) < len(ran[request.request_id]):
            late.append(request)
            turn = say(core, request, 30, 4)
            # What was computed over the last store that was made in time is found, nothing later.
            assert in_time[-1] <= hit(core.step(), turn) < in_time[-1] + 32
            core.finish()
    assert late, ran


@BOTH
def test_others_wait_for_the_deepest_store_that_they_have_in_common(setup):
    core = conversations(setup, max_batched=40)
    common = tokens(180)
    first = core.add(common + tokens(60, 1), 4)
    others = [core.add(common + tokens(60, seed), 4) for seed in (2, 3)]
    seen: dict[str, int] = {}
    while core.scheduler.has_unfinished_requests():
        for new in core.step().scheduled_new_reqs:
            seen[new.req_id] = new.num_computed_tokens
    core.finish()
    assert seen[first.request_id] == 0
    assert all(168 <= seen[other.request_id] <= 176 for other in others)


@BOTH
@pytest.mark.parametrize("steps", [1, 4, nightly(2), nightly(5), 6, nightly(7), nightly(8)])
def test_an_abort_of_the_one_that_others_wait_for(setup, steps):
    core = conversations(setup, max_batched=40)
    common = tokens(180)
    first = core.add(common + tokens(60, 1), 40)
    others = [core.add(common + tokens(60, seed), 40) for seed in (2, 3)]
    for _ in range(steps):
        core.step()
    core.step(between=lambda: core.abort(first))
    if steps % 2:
        core.abort(others[0])
    core.finish()
    assert others[1].num_output_tokens == 40
    third = core.add(common + tokens(60, 4), 4)
    assert 168 <= hit(core.step(), third) <= 176
    core.finish()


@BOTH
def test_a_preempted_request_evicts_at_the_same_positions(setup):
    core = conversations(setup, blocks=60, max_batched=64)
    first = core.add(tokens(150), 120)
    for _ in range(60):
        core.step()
    core.hold(0)
    while not first.num_preemptions:
        core.step()
    core.release()
    seen = walk(core)
    assert set(seen) <= set(POINTS) and seen[-1] == 264
    assert core.invariants.tally.taken_again == 1, "from its last store"


@BOTH
@pytest.mark.parametrize(
    "asked, options",
    [
        ({"kv_eviction_budget": 60}, {}),
        ({"kv_eviction": "streaming-llm"}, {}),
        ({"kv_eviction_protect_first": 4}, {}),
        ({"kv_eviction_every": 64}, {}),
        ({}, {"cache_salt": "other"}),
    ],
    ids=["budget", "policy", "protected", "every", "salt"],
)
def test_nobody_starts_with_what_others_would_not_have_kept(setup, asked, options):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    core.finish()
    say(core, former, 30, asked=asked, **options)
    core.finish()
    assert counters(core).stores_reused == 0


@BOTH
def test_a_store_after_others_is_another_than_a_first_one_at_the_same_position(setup):
    """At 104 both keep 4 blocks of the same tokens, once after an eviction at 72."""
    core = conversations(setup)
    core.add(tokens(150), 4)
    core.finish()
    second = core.add(tokens(150), 4, asked={"kv_eviction_every": 64})
    assert hit(core.step(), second) <= 96
    core.finish()
    third = core.add(tokens(150), 4, asked={"kv_eviction_every": 64})
    assert hit(core.step(), third) == 144
    core.finish()
    assert counters(core).stores_reused == 1


@BOTH
def test_a_reset_forgets_all_of_a_conversation(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    core.finish()
    core.reset()
    second = say(core, former, 30)
    assert hit(core.step(), second) == 0
    core.finish()
    assert counters(core).stores_reused == 0


@BOTH
def test_rewritten_turns_are_reused_up_to_the_first_token_that_differs(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 100)
    core.finish()
    said = list(former.all_token_ids)
    rewritten = core.add(said[:190] + said[210:] + tokens(20, 5), 4)
    assert 168 <= hit(core.step(), rewritten) < 190
    core.finish()


@BOTH
@pytest.mark.parametrize("own", [{"kv_eviction_at": 100}, {"kv_eviction_interval": 64}])
def test_a_request_with_points_or_intervals_of_its_own(setup, own):
    core = conversations(setup)
    core.add(tokens(150), 60, asked=own)
    assert walk(core)[0] == (100 if "kv_eviction_at" in own else 150)
    core.add(tokens(150), 60)
    assert walk(core) == [72, 104, 136, 168, 200]


@BOTH
@pytest.mark.parametrize("count", [1, 12])
def test_answers_that_are_due_in_one_step_wait_for_their_turn(setup, count):
    """More answers are due in a step than it may evict; none is evicted at a greater length."""
    core = conversations(setup, blocks=400, max_num_seqs=16)
    for seed in range(count):
        core.add(tokens(90, seed), 60)
    assert set(walk(core)) == {72, 104, 136}
    assert counters(core).postponed == 0


def store_sizes_asked(length: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the arrival of each of three prompts computes the size of a store. The last one is
    the next turn of the first."""
    shares = dict(pyramid=4, shares=(1.9, 1.2, 0.5, 0.4))
    core = conversations(SYNC, budget="25%", blocks=16000, longest=2000, **shares)
    asked, count = [], EvictionRule.store_blocks
    calls = 0

    def counted(self: EvictionRule, n: int) -> int:
        nonlocal calls
        calls += 1
        return count(self, n)

    with monkeypatch.context() as patch:
        patch.setattr(EvictionRule, "store_blocks", counted)
        for turn in range(3):
            calls = 0
            if turn < 2:
                core.add(tokens(length, 1000 * length + turn), 4 + turn)
                asked.append(calls)
            else:
                say(core, core.requests[0], 40, 9)
                asked.append(calls)
                calls = 0
                core.scheduler.schedule()
                asked.append(calls)
            if turn < 2:
                core.finish()
    assert counters(core).stores_reused == 1
    return asked


def test_an_arrival_does_not_compute_the_positions_of_others_again(monkeypatch):
    """A user waits for a token while a long prompt arrives: 60 ms at 1,000 positions and 8 groups,
    on the thread that schedules."""
    first, *short = store_sizes_asked(300, monkeypatch)
    longest, *long = store_sizes_asked(1500, monkeypatch)
    assert longest > first > 0, "the first one does"
    assert short[0] == long[0]
    assert long[1] <= short[1] + 8 and long[2] <= short[2] + 8, f"{short}, {long}"


def test_what_would_share_nothing_is_refused():
    for changes in (dict(caching=False), dict(full=True)):
        with pytest.raises(ValueError, match="--kv-eviction-every makes stores that requests"):
            conversations(SYNC, **changes)


@pytest.mark.parametrize(
    "setup, groups",
    covering(
        [pytest.param(SYNC, id="sync"), pytest.param(ASYNC, id="async")],
        [
            pytest.param(dict(second_budget=80), id="two budgets"),
            pytest.param(dict(pyramid=3), id="pyramid"),
            pytest.param(dict(budget="25%"), id="share"),
            pytest.param(dict(second_budget=80, sliding_window=20), id="sliding window"),
        ],
    ),
)
def test_groups_that_evict_at_different_positions(setup, groups):
    core = conversations(setup, blocks=600, **groups)
    former = core.add(tokens(200), 100)
    core.finish()
    for _ in range(3):
        before, former = former.num_tokens, say(core, former, 40, 60)
        assert hit(core.step(), former) >= before - 32
        core.finish()
    free = core.setup.blocks - 1 - used_blocks(core)
    assert free == core.setup.blocks - 1
    assert not evictions(core.step())


@BOTH
def test_a_store_that_is_there_already_is_not_counted_as_published(setup):
    """A request that may read no cache makes the stores of its chain again."""
    core = conversations(setup)
    first = core.add(tokens(150), 4)
    core.finish()
    made, ran = counters(core).stores_published, counters(core).evictions
    assert made == len([point for point in POINTS if point <= 150]) == ran
    again = core.add(tokens(150), 4)
    again.skip_reading_prefix_cache = True
    core.finish()
    assert first.is_finished() and again.is_finished()
    assert (counters(core).stores_published, counters(core).evictions) == (made, 2 * ran)


@BOTH
def test_what_a_failed_policy_kept_is_no_store(setup):
    """A policy of another package failed, and the worker kept the newest tokens."""
    core = conversations(setup)
    core.add(tokens(150), 4)
    output = core.step()
    core.settle()
    (eviction,) = getattr(output, PLAN).evictions
    (group,) = eviction.groups
    second = core.add(tokens(150), 4)
    assert core.scheduler._stores.unscored([(eviction.request_id, group.store[0])])
    made = counters(core).stores_published
    core.finish()
    # The first request makes no further store of its chain, and the second one all.
    assert made == 1 and counters(core).stores_reused == 0
    assert counters(core).stores_published - made == len([p for p in POINTS if p <= 150])
    assert second.is_finished()
