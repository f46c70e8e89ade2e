"""The scheduler decides on fixed days what it decided when they were recorded."""

import json

import pytest
import vllm

from tests.engine import golden

RECORDED: dict[str, list[str]] = json.loads(golden.RECORDED.read_text())


@pytest.mark.slow
@pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="recorded with vLLM 0.32")
@pytest.mark.parametrize("kind", golden.KINDS)
def test_the_same_is_decided(kind: str) -> None:
    drawn = golden.digests(kind)
    assert [day.split()[0] for day in drawn] == [day.split()[0] for day in RECORDED[kind]], (
        "other days were drawn: record them with python -m tests.engine.golden"
    )
    changed = [number for number, day in enumerate(drawn) if day != RECORDED[kind][number]]
    assert not changed, (
        f"the scheduler decides otherwise on days {changed}: if this is intended, record them with "
        "python -m tests.engine.golden, and let the commit say why"
    )
