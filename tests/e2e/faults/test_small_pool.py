"""A pool far too small for its load: a storm of requests leaves nothing behind, and requests
that are preempted again and again finish with the tokens they have alone."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.faults.conftest import SMALL_LEN
from tests.e2e.faults.processes import Held
from tests.e2e.faults.sizes import size
from tests.e2e.faults.storm import Storm
from tests.e2e.test_own_settings import asks
from tests.e2e.test_server import complete, wait_for
from tests.models import random_prompt

NEW = 240
GROWTH = 32 * 2**20
"""Bytes that all processes together may grow by, over a storm of any size."""
KEPT = 2.0
"""Seconds without a change after which no connection of an earlier client is open."""


def settled(server, files: int | None = None) -> Held:
    """What the idle server holds, once it has closed what its clients left open."""
    for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_for(server, f"vllm:{metric}", 0)
    deadline = time.monotonic() + 60
    held, since = Held.of(server), time.monotonic()
    # The server keeps a client's connection for 1 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE).
    while time.monotonic() < since + KEPT or (files is not None and held.files > files):
        assert time.monotonic() < deadline, f"{held.files} open files, {files} before"
        time.sleep(0.2)
        last, held = held, Held.of(server)
        if held.files != last.files:
            since = time.monotonic()
    return held


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_storm_leaves_nothing_behind(small_pool):
    probe = random_prompt(300, seed=1)
    # Fills pools, caches and allocators, which stay.
    Storm(small_pool, longest=900, limit=SMALL_LEN, seed=1).run(size(80, 1000), concurrency=40)
    alone = complete(small_pool, probe)[0]["token_ids"]
    before = settled(small_pool)
    counted = small_pool.evictions()
    preempted = small_pool.metric("vllm:num_preemptions_total")

    # Admissions keep room for those that evict, so it is those that never do who are preempted.
    storm = Storm(small_pool, longest=900, limit=SMALL_LEN, seed=2, growing=16)
    storm.run(size(400, 10000), concurrency=40)
    print(f"\n{dict(storm.done)}")
    assert storm.wrong == []

    after = settled(small_pool, before.files)
    print(f"before {before}\nafter  {after}")
    assert (after.threads, after.processes) == (before.threads, before.processes)
    assert after.resident - before.resident < GROWTH
    assert storm.done["finished by abort"] > 10
    assert small_pool.metric("vllm:num_preemptions_total") > preempted
    assert small_pool.evictions()["evictions_decode"] > counted["evictions_decode"]
    assert small_pool.evictions()["evictions_prefill"] > counted["evictions_prefill"] + 30
    assert complete(small_pool, probe)[0]["token_ids"] == alone
    log = small_pool.log.read_text()
    assert "Traceback" not in log and "the server's settings apply" not in log
    print(small_pool.evictions())


@pytest.mark.nightly
def test_preempted_again_and_again(small_pool):
    """Exact where a request evicts at a point of its own or never: it replays to the same cache.

    What evicts in decode evicts anew at another length after a preemption. Its tokens are compared
    with the oracle in ``test_tokens.py``; here it is the load, and must finish.
    """
    # Admissions keep room for what evicts. What never does begins with one block and grows to
    # eight or nine, of which no forecast knows, so that many begin who cannot all go on.
    asked: list[tuple[dict[str, Any], list[list[int]]]] = [
        (mine, [random_prompt(length + n, seed=100 + length + n) for n in range(count)])
        for mine, length, count in (
            (asks(at=135, interval=0), 140, 2), (asks("streaming-llm", at=-4, interval=0), 150, 2),
            ({}, 160, 2), (asks("none"), 8, 24),
        )
    ]  # fmt: skip
    load = [(prompt, mine) for mine, prompts in asked for prompt in prompts]

    def answer(prompts: list[list[int]], mine: dict[str, Any]) -> list[list[int]]:
        """Tokens of prompts that arrive together, however slow the machine is."""
        choices = complete(small_pool, prompts, vllm_xargs=mine, max_tokens=NEW)
        return [one["token_ids"] for one in sorted(choices, key=lambda one: one["index"])]

    before = small_pool.metric("vllm:num_preemptions_total")
    alone = [
        tokens
        for mine, prompts in asked
        for start in range(0, len(prompts), 4)
        for tokens in answer(prompts[start : start + 4], mine)
    ]
    assert small_pool.metric("vllm:num_preemptions_total") == before, "four at once fit"
    counted = small_pool.evictions()["evictions"]
    with ThreadPoolExecutor(len(asked)) as threads:
        found = threads.map(answer, [prompts for _, prompts in asked], [mine for mine, _ in asked])
        together = [tokens for answers in found for tokens in answers]
    preempted = small_pool.metric("vllm:num_preemptions_total") - before
    print(f"\n{preempted:.0f} preemptions of {len(load)} requests")
    assert preempted >= len(load)
    settled(small_pool)
    assert small_pool.evictions()["evictions"] - counted > 6
    for (_, mine), first, second in zip(load, alone, together, strict=True):
        assert len(second) == NEW
        assert first == second or not mine
