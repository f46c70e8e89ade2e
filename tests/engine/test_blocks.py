"""Requests that lacked blocks for ever, or took blocks that were not there.

Blocks of 8, window 8, budget 40: a store of 4 blocks, as in
``test_scheduler``.
"""

from collections import Counter
from dataclasses import replace

import pytest
from vllm.v1.request import Request

from tests.engine.cases import (
    BOTH,
    counters,
    engine,
    evictions,
    hit,
    tokens,
)
from tests.engine.harness import Engine, Setup
from tests.engine.scenarios import Scenario, in_files, run
from tests.engine.wishes import Wish

WHOLE = {"kv_eviction": "none"}


def two_groups(setup, asked: dict) -> tuple[Engine, str]:
    """A request one step short of evictions to 12 blocks in each group, of which 4 are its own."""
    setup = replace(setup, budget=104, second_budget=104, blocks=150, max_batched=8)
    core = engine(replace(setup, shared="evict"))
    core.add(tokens(120), 200, asked=WHOLE)
    for _ in range(17):
        core.step()
    request = core.add(tokens(112) + tokens(46, 2), 40, asked=asked)
    at = asked.get("kv_eviction_at", 158)
    while not any(
        one.request_id.startswith(request.request_id) and one.num_computed_tokens >= at - 8
        for one in core.scheduler.running
    ):
        core.step()
    return core, request


@BOTH
@pytest.mark.parametrize("asked", [{}, {"kv_eviction_at": 154}], ids=["end of a prompt", "point"])
def test_two_groups_share_what_is_free(setup, asked):
    """A user sees every request fail: the engine ends with "Cannot get 8 free blocks".

    The first group took fresh blocks for its whole store because it alone had room, and the second
    then lacked the few that it cannot do without.
    """
    seen = set()
    for free in range(15, 23):
        core, request = two_groups(setup, asked)
        core.hold(min(free, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()))
        for _ in range(4):
            seen |= evictions(core.step()).keys()
        core.release()
        core.finish()
        assert request.num_output_tokens == 40
    assert seen, "none of them evicts"


DOCUMENT = {"kv_eviction_at": 350}


def with_an_idle_store(setup, blocks: int) -> Engine:
    """A pool with the 30 blocks of a store that nobody holds, and two behind it."""
    core = engine(
        replace(setup, budget=248, interval=16, blocks=blocks, max_batched=512, shared="evict")
    )
    core.add(tokens(350) + tokens(20, 1), 2, asked=DOCUMENT | {"kv_eviction_interval": 0})
    core.finish()
    assert counters(core).stores_published == 1
    return core


@BOTH
def test_an_admission_counts_the_store_that_it_reuses_once(setup):
    """A user waits for memory that is free: 46 blocks are enough here, 63 were asked for.

    The request holds the store with its first blocks, so its own eviction, in the same step, writes
    to that store. It was counted as if the store were not there, once more.
    """
    core = with_an_idle_store(setup, 200)
    question = core.add(tokens(350) + tokens(100, 2), 20, asked=DOCUMENT)
    # Positional blocks from the tail start on, the store, and a copy of the block that is cut.
    core.hold(450 // 8 + 1 - 342 // 8 + 30 + 1)
    output = core.step()
    assert output.num_scheduled_tokens == {question.request_id: 100}
    assert hit(output, question) == 350 and evictions(output) == {question.request_id: 450}
    core.release()
    core.finish()


@BOTH
def test_the_copy_of_a_block_that_is_cut_is_not_written_to_before_it_is_made(setup):
    """A user sees every request fail: the engine ends with "Cannot get 19 free blocks".

    Of the 12 blocks that its eviction replaces one is a copy that vLLM still holds. The admission
    counted the block that it is a copy of, which nobody held, as one of the request's own.
    """
    seen = set()
    for free in range(25, 36):
        core = with_an_idle_store(setup, 200)
        core.add(tokens(350) + tokens(20, 3), 100, asked=DOCUMENT | {"kv_eviction_interval": 0})
        core.step()
        question = core.add(tokens(350) + tokens(100, 2), 20, asked=DOCUMENT)
        core.hold(free)
        for _ in range(3):
            seen |= evictions(core.step()).keys() & {question.request_id}
        core.release()
        core.finish()
        assert question.num_output_tokens == 20
    assert seen, "none of them evicts"


@BOTH
def test_a_request_that_needs_less_than_the_pool_is_admitted(setup):
    """A user sees no answer, on an idle server, and whoever asks next waits behind."""
    core = with_an_idle_store(setup, 61)
    question = core.add(tokens(350) + tokens(100, 2), 20, asked=DOCUMENT)
    core.finish()
    assert question.num_output_tokens == 20


@BOTH
def test_an_eviction_that_lacks_blocks_gets_them_before_new_requests(setup):
    """A user's request stays whole on a busy server, although the flag says evict whatever is held.

    Its eviction lacked a few blocks, and who waited in the queue was let in with every block that
    came free, before the eviction was planned.
    """
    setup = replace(setup, shared="evict", budget=88, interval=512, blocks=80, max_batched=32)
    core = engine(replace(setup, max_num_seqs=32))
    core.add(tokens(104), 400, asked=WHOLE)
    for _ in range(5):
        core.step()
    core.hold(free=7 + 6)
    # 13 blocks are shared, 5 its own, and the store has 10.
    long = core.add(tokens(104) + tokens(50, 1), 60)
    asked, seen = 0, {}
    for _ in range(24):
        while len(core.scheduler.waiting) < 4:
            core.add(tokens(12, 100 + asked), 3 + asked % 3)
            asked += 1
        seen |= evictions(core.step())
    assert counters(core).postponed_blocks > 0, "it lacked some"
    assert long.request_id in seen, counters(core)
    core.release()
    core.finish()


@BOTH
def test_prompts_that_share_and_stream_in_do_not_preempt_each_other_for_ever(setup):
    """A user sees no token any more: four equal prompts that fit the pool one by one.

    Each put its evictions off because the others held the same blocks, none fitted whole, and all
    were preempted together, and began together again from the prefix cache.
    """
    setup = replace(
        setup, budget=40, window=4, blocks=88, block_size=16, max_num_seqs=5, pyramid=4, beta=2.0,
        sliding_window=5, prefill_interval=200, longest=700, reserve_full=False,
    )  # fmt: skip
    core = engine(setup)
    prompts = [core.add(tokens(448), 86) for _ in range(4)]
    core.finish()
    assert all(prompt.num_output_tokens == 86 for prompt in prompts)


@BOTH
def test_a_replay_stops_at_a_point_that_is_the_prompts_end(setup):
    """Preempted with a token in flight, it was taken for one that cannot reach beyond its point."""
    core = engine(setup)
    request = core.add(tokens(100), 20, asked={"kv_eviction_at": 100, "kv_eviction_interval": 0})
    stopping = core.scheduler._table.stopping
    assert request.request_id in stopping
    for _ in range(4):
        core.step()
    assert request.request_id not in stopping, "its prompt is computed"
    core.finish()


def postponing(setup, shared: int, other: int = 0) -> tuple[Engine, list, Request | None]:
    """Two requests that begin with as many blocks of one prefix, and are due to keep one more.

    They evict in decode, whatever is shared, and lack blocks. ``other`` blocks are another one's.
    """
    setup = replace(setup, budget=8 * (shared + 1) + 8, interval=16, blocks=101)
    core = engine(replace(setup, shared="evict", max_batched=128))
    third = core.add(tokens(8 * other - 4, 7), 80, asked=WHOLE) if other else None
    both = []
    for seed in (1, 2):
        both.append(core.add(tokens(8 * shared) + tokens(4, seed), 200))
        while not both[-1].num_output_tokens:
            core.step()
    while counters(core).postponed_blocks < 8:
        core.step()
    assert not counters(core).evictions
    return core, both, third


@BOTH
def test_evictions_that_cannot_run_yet_hold_back_nobody(setup):
    """A user of a busy server waits for as long as two others answer, and there is room.

    Both evict over one long prefix, and each lacks more blocks than running requests hold besides.
    What they lack together was kept free of admissions.
    """
    core, both, _ = postponing(setup, 60)
    small = core.add(tokens(30, 9), 4)
    for _ in range(8):
        core.step()
    assert small.num_output_tokens == 4 and small.is_finished()
    assert not any(request.is_finished() for request in both)
    core.finish()


@BOTH
def test_an_eviction_that_others_make_room_for_is_not_overtaken(setup):
    """Each block that comes free would else be taken by an admission before it is planned again."""
    core, both, ends = postponing(setup, 30, 36)
    late = core.add(tokens(60, 9), 4)
    while not ends.is_finished():
        assert not counters(core).evictions and not late.num_computed_tokens, "in its place"
        core.step()
    for _ in range(4):
        core.step()
    assert counters(core).evictions and not any(request.is_finished() for request in both)
    core.finish()


def test_an_eviction_may_be_put_off_in_the_step_that_takes_a_store():
    """A step takes a store, hits the blocks that follow it, and reaches the next eviction.

    Others share those blocks, so the eviction is put off, and the request holds more blocks.
    """
    scenario = Scenario(
        setup=Setup(
            budget=96,
            window=1,
            interval=64,
            needs_window=False,
            second_budget=None,
            pyramid=0,
            beta=20.0,
            shares=(),
            sliding_window=None,
            blocks=90,
            block_size=16,
            max_num_seqs=6,
            max_batched=64,
            long_prefill=0,
            caching=True,
            asynchronous=False,
            priority=False,
            rings=2,
            reserve_full=True,
            watermark=0.0,
            shared="keep",
            when="always",
            marks=(0.05, 0.1),
            prefill_interval=0,
            longest=None,
            memory=100000,
            disk=None,
            audit=0.0,
            offload=6,
            chunk=1,
            answers=True,
            connector="",
        ),
        seed=2963,
        events=[
            ("squeeze", 29, 4),
            ("abort", 3, True),
            ("abort", 0, False),
            ("lose", 15, 28),
            ("add", 116, 4, 2, 1, None),
            ("ask", 3, 4, 7, 3),
            ("squeeze", 33, 1),
            ("follow", 6, 17, 22),
            ("add", 347, 2, 91, 1, None),
            ("steps", 21),
            ("steps", 21),
            ("follow", 13, 15, 3),
            ("ask", 3, 2, 60, 42),
            ("steps", 86),
            ("ask", 3, 4, 25, 1),
            (
                "repeat",
                17,
                14,
                Wish(
                    policy="snapkv",
                    budget=100,
                    interval=16,
                    protect=0,
                    at=None,
                    from_end=False,
                    when="pressure",
                    prefill=0,
                ),
            ),
            (
                "many",
                315,
                4,
                103,
                Wish(
                    policy=None,
                    budget=20,
                    interval=None,
                    protect=2.6,
                    at=0.3699176933093461,
                    from_end=False,
                    when=None,
                    prefill=0,
                ),
            ),
            ("reset", 6, True),
            ("steps", 23),
            ("burst", 100, 4, 0, 60),
            (
                "many",
                131,
                3,
                5,
                Wish(
                    policy=None,
                    budget=110,
                    interval=16,
                    protect=0.5,
                    at=0.7029466919416676,
                    from_end=False,
                    when="always",
                    prefill=0,
                ),
            ),
        ],
    )
    totals: Counter[str] = Counter()
    run(in_files(scenario), totals)
    assert totals["skipped_shared"] and totals["taken"] and totals["evictions"]
