"""Set-ups and helpers of directed cases in vLLM's real schedulers."""

import random
from dataclasses import replace

import pytest

from tests.engine.harness import VOCABULARY, Engine, Setup
from vllm_kvevict.rules.step_plan import PLAN

SYNC = Setup(interval=64)
ASYNC = replace(SYNC, asynchronous=True)
BOTH = pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]


def no_stop(request_id: str, so_far: list[int]) -> int:
    """Tokens that differ from request to request, and never end one."""
    return 2 + hash((request_id, len(so_far))) % (VOCABULARY - 2)


def engine(setup: Setup) -> Engine:
    return Engine(setup, no_stop)


def evictions(output) -> dict[str, int]:
    plan = getattr(output, PLAN, None)
    return {e.request_id: e.num_tokens for e in plan.evictions} if plan else {}


def used_blocks(core: Engine) -> int:
    return core.setup.blocks - 1 - core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def counters(core: Engine):
    return core.scheduler.eviction_counters


def hit(output, request) -> int:
    (new,) = [new for new in output.scheduled_new_reqs if new.req_id == request.request_id]
    return new.num_computed_tokens


def lose(core: Engine) -> None:
    """The pool loses what nobody holds."""
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
