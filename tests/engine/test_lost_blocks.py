"""Loads that fail in the step that admits a request, and whatever hides it until that is known.

Setup as in ``test_scheduler``: blocks of 8, window 8, budget 40, steps of 64 tokens. The connector
has the first tokens of the prompt and loses those from 40 on.
"""

from dataclasses import replace

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.cases import SYNC, counters, engine, evictions, hit, tokens
from tests.engine.harness import Engine, Setup
from tests.engine.saving import ShadowSaving
from tests.engine.scenarios import Scenario, run
from vllm_kvevict.config.connectors import EXAMPLE
from vllm_kvevict.engine.lost_blocks import LoadsInFlight, Trace

SAVES = replace(
    SYNC, connector=EXAMPLE, load_failure="fail", asynchronous=True, blocks=128, shared="evict"
)
BOTH = pytest.mark.parametrize(
    "setup", [SAVES, replace(SAVES, asynchronous=False)], ids=["async", "sync"]
)
PROMPT = tokens(195)
LOST_FROM = 40
AT_100 = {"kv_eviction_at": 100}


def losing(setup: Setup, saved: int) -> Engine:
    """An engine with a connector that has ``saved`` tokens and loses some in the first load."""
    core = engine(setup)
    remote = core.worker.remote
    assert isinstance(remote, ShadowSaving)
    remote.learn(PROMPT, saved)
    remote.first_lost = lambda start, end: LOST_FROM if remote.failures == 0 else end
    return core


def add(core: Engine, prompt: list[int], max_tokens: int = 20, **options):
    return core.add(prompt, max_tokens, prefilled=False, **options)


def ended(*requests) -> bool:
    """Whether requests ended with an error, and without a token."""
    return all(
        one.status is RequestStatus.FINISHED_ERROR and not one.num_output_tokens for one in requests
    )


def ask_again(core: Engine) -> None:
    """The same prompt is computed anew from the first lost block on, and answered."""
    remote = core.worker.remote
    assert isinstance(remote, ShadowSaving)
    core.settle()
    remote.saved.clear()
    request = add(core, PROMPT)
    assert hit(core.step(), request) == LOST_FROM
    core.finish()
    assert request.num_output_tokens == 20


@pytest.mark.parametrize("second_budget", [None, 64], ids=["one group", "two groups"])
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh blocks", "own blocks"])
def test_an_eviction_that_was_planned_before_the_report(second_budget, in_place):
    core = losing(replace(SAVES, second_budget=second_budget, blocks=160), 96)
    request = add(core, PROMPT)
    bystander = add(core, PROMPT[:LOST_FROM] + tokens(60, 9))
    core.step()
    if in_place:
        core.hold(16 * core.setup.groups)
    output = core.schedule()
    assert evictions(output)[request.request_id] == 195
    core.process()
    assert ended(request)
    core.settle()
    core.release()
    assert bool(counters(core).evictions_in_place) == in_place
    assert core.losses is not None and core.losses.tally["lost_evicting_ahead"] == 1
    while not bystander.is_finished():
        core.step()
    assert bystander.num_output_tokens == 20, "it has nothing of what was lost"
    ask_again(core)


@BOTH
def test_an_eviction_in_the_step_that_loads(setup):
    core = losing(setup, 192)
    request = add(core, PROMPT)
    assert evictions(core.schedule()) == {request.request_id: 195}
    core.process()
    assert ended(request)
    ask_again(core)


def test_another_request_hits_what_was_lost_and_evicts():
    core = losing(SAVES, 192)
    first = add(core, PROMPT)
    core.step()
    second = add(core, PROMPT[:160] + tokens(30, 3))
    output = core.schedule()
    assert hit(output, second) == 160 and evictions(output) == {second.request_id: 190}
    core.process()
    assert ended(first, second)
    ask_again(core)


def test_another_request_hits_what_was_lost_and_evicts_inside_its_prompt():
    core = losing(SAVES, 192)
    first = add(core, PROMPT)
    core.step()
    asked = {"kv_eviction_prefill_interval": 64}
    second = add(core, PROMPT[:160] + tokens(90, 3), asked=asked)
    output = core.schedule()
    assert evictions(output) == {second.request_id: 104}
    core.process()
    assert ended(first, second)
    ask_again(core)


@BOTH
@pytest.mark.parametrize("asked", [None, {"kv_eviction": "none"}], ids=["evicts", "never evicts"])
def test_nothing_is_saved_that_was_computed_over_what_was_lost(setup, asked):
    """LMCache saves what it is told to, and answers later requests from it.

    The request that loads computes the rest of its prompt in two steps, and in the second another
    one hits its blocks. A bystander is saved in both, and after the report all are.
    """
    core = losing(setup, 96)
    remote = core.worker.remote
    assert isinstance(remote, ShadowSaving)
    loading = add(core, PROMPT, asked=asked)
    core.schedule()
    bystander = add(core, tokens(16, 5), asked=asked)
    hits = add(core, PROMPT[:96] + tokens(30, 3), asked=asked)
    if setup.asynchronous:
        # Planned before the report.
        output = core.schedule()
        assert hit(output, hits) == 96 and output.num_scheduled_tokens[loading.request_id]
    core.process()
    assert remote.unsaved == 1 and not remote.unsaved_ahead
    known = set(remote.saved)
    core.settle()
    assert remote.unsaved_ahead == (2 if setup.asynchronous else 0)
    if setup.asynchronous:
        assert ended(loading, hits) and len(remote.saved) > len(known), "the bystander is saved"
    saves = remote.saves
    again = add(core, PROMPT + tokens(30, 6), asked=asked)
    core.finish()
    assert again.num_output_tokens == bystander.num_output_tokens == 20
    assert remote.unsaved_ahead <= 2 and remote.saves > saves


@pytest.mark.parametrize("window", [8, 4])
@pytest.mark.parametrize("aborts", [False, True], ids=["maker stays", "maker leaves"])
def test_a_store_that_was_made_of_what_was_lost(aborts, window):
    """One request makes it in the step that loads, another one starts with it in the next.

    With a window of 4 they share no block but those of the store.
    """
    core = losing(replace(SAVES, window=window), 192)
    loading = add(core, PROMPT)
    maker, user = [add(core, PROMPT[:100] + tokens(30, seed), asked=AT_100) for seed in (1, 2)]
    assert evictions(core.schedule()) == {loading.request_id: 195, maker.request_id: 100}
    if aborts:
        core.abort(maker)
    assert hit(core.schedule(), user) == 100 and counters(core).stores_reused == 1
    core.process()
    assert ended(loading, user) and (aborts or ended(maker))
    core.settle()
    later = add(core, PROMPT[:100] + tokens(30, 4), asked=AT_100)
    core.finish()
    assert later.num_output_tokens == 20
    assert counters(core).stores_published == 2 and counters(core).stores_reused == 1


def test_tokens_that_an_eviction_in_place_replaces_are_not_lost():
    """A request loses its last block and evicts into blocks of right tokens, in one of two groups.

    Another one shares the blocks of these tokens in the other group. It is right and goes on:
    ``Losses`` complains of a request that ends and has computed over no loss.
    """
    setup = Setup(
        budget="50%", window=16, interval=16, second_budget=78, blocks=75, block_size=16,
        max_num_seqs=6, max_batched=24, asynchronous=True, shared="evict",
        connector=EXAMPLE, load_failure="fail",
    )  # fmt: skip
    events = [
        ("burst", 192, 5, 4, 1), ("ask", 0, 3, 18, 92), ("burst", 117, 3, 4, 8),
        ("ask", 0, 2, 32, 8), ("steps", 4), ("add", 35, 3, 16, 1, None), ("add", 8, 0, 1, 1, None),
        ("follow", 0, 4, 47), ("forget",), ("burst", 138, 3, 4, 8), ("ask", 0, 2, 35, 8),
        ("many", 73, 2, 54, None),
    ]  # fmt: skip
    core = run(Scenario(setup=setup, seed=229, events=events))
    assert core.losses is not None and core.losses.tally["lost_evicting"] > 0
    assert counters(core).evictions_in_place > 0


def test_wrong_survivors_are_read_from_stores_only():
    """A request may have left, and an eviction of another one in place has filled its last block
    since: that the survivors are wrong says nothing of the tokens that were there."""
    left = Trace("left", positional=[(0, 1), (8, 2)], read={7})
    assert left.first_over(lost={9}, filled={1, 2}) is None
    assert left.first_over(lost={2}, filled=set()) == 8
    assert left.first_over(lost={2}, filled={7}) == 0
    assert left.computed_from(8) == {2}


@BOTH
def test_blocks_of_a_request_that_left_before_the_report(setup):
    core = losing(setup, 192)
    request = add(core, PROMPT)
    core.schedule()
    core.abort(request)
    core.process()
    ask_again(core)


def test_blocks_of_a_request_that_hit_them_and_left_before_the_report():
    """What it computed behind them would be found once the lost blocks are computed anew."""
    core = losing(SAVES, 96)
    first = add(core, PROMPT)
    core.step()
    second = add(core, PROMPT[:96] + tokens(60, 3))
    assert hit(core.schedule(), second) == 96
    core.abort(second)
    core.process()
    assert ended(first)
    ask_again(core)
    third = add(core, PROMPT[:96] + tokens(60, 3))
    assert hit(core.step(), third) == 96
    core.finish()


@BOTH
def test_a_request_that_was_preempted_before_the_report(setup):
    core = losing(setup, 192)
    request = add(core, PROMPT)
    core.schedule()
    if setup.asynchronous:
        # vLLM keeps the blocks until the step was processed, and cannot reset them.
        with pytest.raises(RuntimeError, match="Failed to reset"):
            core.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.process()
    assert ended(request)
    core.finish()


def test_each_part_is_needed(monkeypatch):
    def broken(test, *arguments, **changes) -> None:
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            for name, value in changes.items():
                patch.setattr(LoadsInFlight, name, value)
            test(*arguments)

    trace, depending = LoadsInFlight._trace, LoadsInFlight.depending

    def without_evictions(self, request_id):
        found = trace(self, request_id)
        return Trace(request_id, found.positional[:1], found.read)

    def without_stores(self, request_id):
        found = trace(self, request_id)
        return Trace(request_id, found.positional)

    def without_blocks(self, lost):
        return depending(self, lost)[0], set(lost)

    broken(
        test_an_eviction_that_was_planned_before_the_report, None, False, _trace=without_evictions
    )
    broken(test_another_request_hits_what_was_lost_and_evicts, _trace=without_evictions)
    broken(test_a_store_that_was_made_of_what_was_lost, False, 4, _trace=without_stores)
    broken(test_a_store_that_was_made_of_what_was_lost, True, 4, leaves=lambda *_: None)
    broken(
        test_blocks_of_a_request_that_left_before_the_report,
        SAVES,
        depending=lambda *_: (set(), set()),
    )
    broken(
        test_blocks_of_a_request_that_hit_them_and_left_before_the_report, leaves=lambda *_: None
    )
    broken(
        test_blocks_of_a_request_that_hit_them_and_left_before_the_report, depending=without_blocks
    )
