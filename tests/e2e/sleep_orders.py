"""Sleep, release of the KV cache and wake-up in any order, as far as vLLM allows it."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

CALLS = ("pause", "sleep 1", "sleep 2", *["release"] * 3, "wake", "wake weights", "wake kv_cache")


def random_calls(seed: int, count: int) -> list[str]:
    """A random order of calls."""
    return random.Random(seed).choices(CALLS, k=count)


def sleepy(run: Any, model: Path, calls: Iterable[str]) -> list[str]:
    """Make these calls; the engine is awake at the end.

    Args:
        run: The engine of :func:`tests.oracles.engine.engine`, without requests.
        model: Folder of its weights, which are loaded again when sleep has lost them.
        calls: Of :data:`CALLS`. vLLM refuses to release what sleeps, and parts that are awake are
            not woken up.

    Returns:
        The calls, with what became of them.

    """
    core, done = run.core, list[str]()
    weights_are_lost = False
    # As a server does: the workers hear that the last requests have finished.
    while core.scheduler.has_requests():
        core.step()
    for call in [*calls, "wake"]:
        verb, _, rest = call.partition(" ")
        asleep = set(core.model_executor.sleeping_tags)
        if verb in ("pause", "release"):
            core.sleep(0)
        if verb == "sleep":
            weights_are_lost |= rest == "2" and "weights" not in asleep
            core.sleep(int(rest))
        elif verb == "release" and asleep:
            with pytest.raises(RuntimeError, match="all executor memory to be resident"):
                core.release_kv_cache_memory()
            call += " refused"
        elif verb == "release":
            core.release_kv_cache_memory()
        elif verb == "wake" and asleep.issuperset([rest] if rest else asleep):
            core.wake_up([rest] if rest else None if asleep else ["scheduling"])
            if weights_are_lost and "weights" not in core.model_executor.sleeping_tags:
                run.llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(model)))
                weights_are_lost = False
        done.append(call)
    assert not core.is_sleeping()
    return done
