"""One request from its arrival to its freed blocks, through the functions that the page names."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.models import random_prompt
from tests.oracles.engine import engine

PACKAGE = Path(sys.modules["vllm_kvevict"].__file__ or "").parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"

LANDMARKS = {
    ("engine/table.py", "add"),
    ("engine/blocks.py", "evict"),
    ("cache/state.py", "record"),
    ("engine/blocks.py", "free_replaced"),
}
"""Where a request's record, its store, its page table and its free blocks are made. The page names
every file of the package that calls them."""


def listed() -> list[tuple[str, str]]:
    """The files and functions of the page's list, in its order."""
    (section,) = re.findall(r"^## From arrival .*?(?=^## )", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `(\w+)`", section, re.MULTILINE)


@pytest.mark.slow
def test_a_request_passes_through_the_listed_functions(tiny_model: Path) -> None:
    steps = listed()
    assert set(steps) >= LANDMARKS
    called: dict[tuple[str, str], None] = {}
    callers: set[str] = set()

    def place(frame: FrameType) -> tuple[str, str] | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return None
        return str(path.relative_to(PACKAGE)), frame.f_code.co_name

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (here := place(frame)) not in steps:
            return
        called.setdefault(here)
        if here in LANDMARKS:
            caller: FrameType | None = frame
            while caller is not None:
                if (where := place(caller)) is not None:
                    callers.add(where[0])
                caller = caller.f_back

    with engine(tiny_model, dict(policy="ada-snapkv", budget=96, interval=0)) as run:
        sys.setprofile(watch)
        try:
            run.generate([random_prompt(400, seed=1)], 2, [dict(kv_eviction_budget=80)])
        finally:
            sys.setprofile(None)
        assert run.counters.evictions == 1 and run.counters.blocks_freed > 0
    assert list(called) == steps
    assert callers <= {file for file, _ in steps}
