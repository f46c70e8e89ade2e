"""Many long prompts beside vLLM's offload, in a pool that has room for two: somebody always runs.

Users have reported servers with nobody running and everybody waiting, for ever (vllm#45414, #49674,
#57841). A server would print that every ten seconds; here each step is looked at.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import counters, lose, no_stop, tokens
from tests.engine.harness import Engine, Setup
from tests.nightly import covering

SETUP = Setup(
    budget=64, window=8, interval=16, blocks=90, max_num_seqs=16, max_batched=512,
    asynchronous=True, offload=1200,
)  # fmt: skip
LENGTH, COUNT, NEW_TOKENS = 300, 16, 30
PATIENCE = 16
"""Steps that loads may take while nobody else can run."""


def answer(engine: Engine, prompts: list[list[int]], **options: object) -> int:
    """Answer prompts that arrive together; returns the longest time with nobody running."""
    requests = [
        engine.add(prompt, NEW_TOKENS, priority=number % 3, **options)
        for number, prompt in enumerate(prompts)
    ]
    longest = still = 0
    done = -1
    while not all(request.is_finished() for request in requests):
        engine.step()
        running, waiting = engine.scheduler.get_request_counts()
        computed = sum(request.num_tokens for request in requests)
        still = still + 1 if waiting and (not running or computed == done) else 0
        longest, done = max(longest, still), computed
        assert still <= PATIENCE, f"{running} running, {waiting} waiting, and no token"
    engine.finish()
    assert all(request.num_output_tokens == NEW_TOKENS for request in requests)
    return longest


@pytest.mark.parametrize(
    "priority, common, twice", covering([False, True], [0, 240], [False, True])
)
def test_sixteen_long_prompts_are_answered(priority, common, twice):
    """Some share their beginning; of ``twice``, each is sent two times, so that a request waits
    for blocks that are being loaded for another one."""
    engine = Engine(replace(SETUP, priority=priority), no_stop)
    offload = engine.worker.offload
    assert offload is not None
    distinct = COUNT // 2 if twice else COUNT
    prompts = [
        tokens(common) + tokens(LENGTH - common, seed=1 + number % distinct)
        for number in range(COUNT)
    ]
    for round_ in range(3):  # From the second round on, what the pool lost is loaded.
        loads = offload.loads
        answer(engine, prompts)
        lose(engine)
        assert offload.loads > loads or not round_
    assert offload.loads and counters(engine).evictions >= COUNT


def test_beside_requests_that_never_evict():
    engine = Engine(SETUP, no_stop)
    for _ in range(2):
        answer(
            engine, [tokens(LENGTH, seed=n) for n in range(COUNT)], asked={"kv_eviction": "none"}
        )
        lose(engine)
        answer(engine, [tokens(LENGTH, seed=n) for n in range(COUNT)])
    assert engine.worker.offload is not None and engine.worker.offload.loads
    assert counters(engine).evictions >= COUNT
