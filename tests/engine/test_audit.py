"""Replays in vLLM's real schedulers: they change no eviction, and give way."""

from dataclasses import replace

import pytest
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from tests.engine.cases import ASYNC, SYNC, counters, engine, evictions, tokens
from tests.engine.harness import Setup, make_scheduler
from tests.engine.views import replays_of

AUDITED = [replace(setup, audit=1.0, max_batched=512) for setup in (SYNC, ASYNC)]
BOTH = pytest.mark.parametrize("setup", AUDITED, ids=["sync", "async"])


def lengths(core, count: int = 1) -> list[dict[str, int]]:
    """Evictions of every step of ``count`` requests of one prompt."""
    for seed in range(count):
        core.add(tokens(130, seed), 90)
    found = []
    while core.scheduler.has_unfinished_requests():
        found.append(evictions(core.step()))
    core.finish()
    return [one for one in found if one]


@BOTH
@pytest.mark.parametrize("interval", [4, 8, 16, 64])
def test_evictions_are_those_of_a_server_without(setup: Setup, interval: int):
    """Also where a window begins at once behind the last eviction, whose blocks a replay holds."""
    setup = replace(setup, interval=interval, max_num_seqs=4)
    core = engine(setup)
    assert lengths(core, 2) == lengths(engine(replace(setup, audit=0.0)), 2) != []
    found = counters(core)
    assert found.skipped_shared == 0
    assert found.tokens_audited % setup.window == 0
    audited = found.tokens_audited // setup.window
    assert audited + found.audits_dropped == found.evictions and core.worker.compared == audited
    assert audited >= (2 if interval < 16 else found.evictions - 2)


@BOTH
def test_replays_do_not_count_in_vllms_prefix_cache_hit_rate(setup: Setup):
    core = engine(replace(setup, blocks=90))
    stats = core.scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    core.scheduler.kv_cache_manager.make_prefix_cache_stats = lambda: stats
    core.add(tokens(130), 40)
    core.finish()
    assert core.worker.compared and (stats.requests, stats.queries) == (1, 130)


@BOTH
def test_the_prefix_cache_can_be_reset_while_a_replay_waits(setup: Setup):
    """Weight updates do so: vLLM refuses where a block is held."""
    core = engine(replace(setup, max_num_seqs=1))
    core.add(tokens(130), 40)
    while not counters(core).evictions:
        core.step()
    core.settle()
    assert [held.held for held in replays_of(core.scheduler)._waiting.values()]
    core.reset()
    assert not replays_of(core.scheduler)._waiting and counters(core).audits_dropped == 1
    core.finish()


@BOTH
def test_it_goes_first_when_a_place_is_free(setup: Setup):
    """It holds a store, and needs a few blocks: it does not wait for others' whole answers."""
    core = engine(replace(setup, max_num_seqs=1))
    core.add(tokens(130), 4)
    core.add(tokens(40, 1), 6)
    core.finish()
    assert core.worker.compared == 1 and counters(core).audits_dropped == 0
    assert counters(core).requests_evicted == 1 == counters(core).requests_whole


@BOTH
def test_it_is_given_up_after_a_while(setup: Setup):
    core = engine(replace(setup, max_num_seqs=1, interval=0, blocks=90))
    request = core.add(tokens(130), 200)
    for _ in range(90):
        core.step()
    assert counters(core).evictions == 1 == counters(core).audits_dropped
    assert not replays_of(core.scheduler)._waiting and not request.is_finished()
    core.finish()


@BOTH
def test_the_request_may_go_away_meanwhile(setup: Setup):
    """Its store stays until the replay is over."""
    core = engine(setup)
    request = core.add(tokens(130), 40)
    while not counters(core).evictions:
        core.step()
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    core.finish()
    assert core.worker.compared == 1 and counters(core).audits_dropped == 0


def test_only_those_that_are_drawn():
    core = engine(replace(AUDITED[0], audit=0.3, max_num_seqs=8, blocks=200))
    for seed in range(30):
        core.add(tokens(130, seed), 2)
    core.finish()
    assert counters(core).evictions == 30
    assert 3 <= core.worker.compared + counters(core).audits_dropped <= 15


@BOTH
def test_it_is_preempted_before_any_client(setup: Setup):
    """Also before the one that it replays, which has its priority and came at the same time."""
    core = engine(replace(setup, priority=True, interval=0, max_batched=2, blocks=90))
    client = core.add(tokens(130), 60, priority=3)
    while not any("-audit-" in one.request_id for one in core.scheduler.running):
        core.step()
    (replay,) = [one for one in core.scheduler.running if one is not client]
    core.hold(0)
    while not (client.num_preemptions or replay.num_preemptions):
        core.step()
    assert (client.num_preemptions, replay.num_preemptions) == (0, 1)
    core.release()
    core.finish()
    assert client.num_output_tokens == 60 and counters(core).audits_dropped == 1


def test_it_hashes_no_prompt():
    """The engine would hash a long prompt again for every audit, while all others wait."""
    core = engine(replace(SYNC, audit=1.0, max_batched=512))
    client = core.add(tokens(130), 40)
    seen = {}
    while not client.is_finished():
        core.step()
        seen |= {name: one for name, one in core.scheduler.requests.items() if one is not client}
    core.finish()
    assert seen and core.worker.compared == len(seen)
    assert client.block_hashes and not any(one.block_hashes for one in seen.values())


@pytest.mark.parametrize(
    "others", [dict(sliding_window=32), dict(sliding_window=32, chunked=True), dict(full=True)]
)
def test_refused_with_layers_that_do_not_evict(monkeypatch: pytest.MonkeyPatch, others):
    """vLLM reads the blocks of a hit in every group, and a replay has those of some."""
    monkeypatch.setattr(Setup, "audits", property(lambda setup: setup.audit))
    setup = replace(SYNC, audit=1.0, **others)
    with pytest.raises(ValueError, match=r"--kv-eviction-audit .* eviction in all layers"):
        make_scheduler(setup)
    assert make_scheduler(replace(setup, audit=0.0))
