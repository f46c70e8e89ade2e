"""What vLLM says without this package, from a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.e2e.stock_script import MARK, RESULT


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Servers are forked from a process that has imported vLLM, where their environment allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.server.start", forked.start)
        yield


def run_stock(model: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """Run ``stock_script``; returns its result and its log up to where eviction starts."""
    done = forked.run("tests.e2e.stock_script", model, *arguments, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log, rest = done.stdout.split(MARK)
    return json.loads(rest.split(RESULT)[1].splitlines()[0]), log


@pytest.fixture(scope="session")
def stock(tiny_model) -> dict[str, Any]:
    """What vLLM says in a process that loads no plugin, its log included."""
    result, log = run_stock(tiny_model, VLLM_PLUGINS="")
    return result | dict(log=log)
