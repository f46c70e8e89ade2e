"""Digests of what the scheduler decides on random days with fixed seeds.

A refactoring must decide the same: the plan of each step, the tokens of each request and its
block ids. ``python -m tests.engine.golden`` records the digests again after a change that decides
otherwise on purpose; the commit says why.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.engine.days import play
from tests.engine.scenarios import (
    Day,
    Scenario,
    conversing,
    in_few_bits,
    in_files,
    live,
    loading,
    streaming_in,
    under_pressure,
)
from vllm_kvevict.config import config
from vllm_kvevict.rules.step_plan import PLAN, StoreCopy

RECORDED = Path(__file__).with_name("golden_days.json")

SEED = 73
DAYS = 3
"""Number of days of each kind."""

KINDS: dict[str, Callable[[Scenario], Scenario]] = {
    "plain": lambda day: day,
    "pressure": under_pressure,
    "streaming in": streaming_in,
    "conversations": conversing,
    "files": in_files,
    "loads": loading,
    "few bits": lambda day: conversing(in_few_bits(day)),
}


class Digest:
    """Digest of the decisions of one engine.

    Names of stores are digests of their keys. Each is replaced by the number of its first
    appearance, so that keys may change.
    """

    def __init__(self) -> None:
        self._sha = sha256()
        self._names: dict[str, int] = {}

    def add(self, output: Any) -> None:
        """Add a step."""
        cached = output.scheduled_cached_reqs
        step = [
            output.num_scheduled_tokens,
            [(r.req_id, r.num_computed_tokens, r.block_ids) for r in output.scheduled_new_reqs],
            [cached.req_ids, cached.num_computed_tokens, cached.new_block_ids],
            sorted(output.preempted_req_ids or ()),
            sorted(output.finished_req_ids),
            list(self._plain(getattr(output, PLAN, None))),
        ]
        self._sha.update(repr(step).encode())

    def _plain(self, value: Any) -> Iterator[Any]:
        """The parts of a plan that are the same in every process, in order."""
        if isinstance(value, StoreCopy):
            yield "copy", self._number(value.name), value.keep, value.write, bool(value.payload)
            value = value.groups
        if is_dataclass(value):
            for field in fields(value):
                yield field.name
                part = getattr(value, field.name)
                if field.name == "forgotten":
                    part = [self._number(name) for name in part]
                yield from self._plain(part)
        elif isinstance(value, dict):
            yield from self._plain(list(value.items()))
        elif isinstance(value, set):
            yield sorted(value)
        elif isinstance(value, list | tuple):
            yield len(value)
            for part in value:
                yield from self._plain(part)
        else:
            yield value

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def __str__(self) -> str:
        return self._sha.hexdigest()[:16]


def lived(day: Scenario) -> str:
    """Play a day; return its digest, and that of all decisions on it.

    vLLM's offload goes through its blocks in the order of their hashes, and a failing disk damages
    files by their names. Both would be others after a change of a key, so the days are without.
    """
    disk = None if day.setup.disk is None else 0.0
    setup = replace(day.setup, offload=0, disk=disk)
    with patch.dict(os.environ, PYTHONHASHSEED="73"):
        # vLLM draws its first hash, unless it is told how.
        lived = Day(replace(day, setup=setup))
    digest = Digest()
    lived.engine.seen = digest.add
    for name in ("scheduled", "executed", "check", "check_idle"):
        # Other tests look after these, which take most of the time.
        setattr(lived.engine.invariants, name, lambda *args: None)
    live(lived, day)
    return f"{sha256(repr(day).encode()).hexdigest()[:8]} {digest}"


def drawn(kind: str) -> list[Scenario]:
    """The days of a kind."""
    days: list[Scenario] = []
    play(lambda day: days.append(KINDS[kind](day)), DAYS, SEED)
    return days


def digests(kind: str) -> list[str]:
    """The digests of all days of a kind."""
    return [lived(day) for day in drawn(kind)]


def record() -> None:
    """Write the digests of today's code."""
    # As in all tests of this folder.
    config.EVERY_MIN_TOKENS = 1
    text = json.dumps({kind: digests(kind) for kind in KINDS}, indent=1)
    RECORDED.write_text(text + "\n")


if __name__ == "__main__":
    record()
