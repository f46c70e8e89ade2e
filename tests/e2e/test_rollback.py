"""The documented rollback: a server with every flag of configuration.md, then the same command with
``--kv-eviction none``. Each request of recipes.md is answered before and after it."""

import json
import re
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.test_recipes import FLAGS, RECIPES, of_length
from tests.nightly import nightly
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import KEYS
from vllm_kvevict.config.sentences import flag

LENGTH = 1000

VALUES = {
    "policy": "ada-snapkv",
    "budget": "256",
    "window": "16",
    "interval": "64",
    "prefill_interval": "256",
    "every": "0",
    "when": "always",
    "profile": "none",
    "calibrate_seconds": "60",
    "allow": "snapkv,none",
    "max_budget": "4096",
    "protect_system": "true",
    "shared_blocks": "evict",
    "attention": "auto",
    "kernels": "optional",
    "ring_memory": "64M",
    "store_memory": "64M",
    "store_path": "FOLDER,max=1G",
    "audit": "10%",
    "store_dtype": "int4",
    "options": '{"floor": 0.3}',
}
"""Values of all flags that go together, but that a cap on budgets rules out ``none``, and that
:data:`GROWING` replaces some."""

GROWING = {"every": "256", "prefill_interval": None, "audit": None}
"""A server for conversations that grow evicts at fixed positions only."""

ALL_KEYS = {
    "prompt": "DOCUMENT\n\nQuestion: QUESTION",
    "vllm_xargs": {
        "kv_eviction": "snapkv",
        "kv_eviction_budget": 320,
        "kv_eviction_interval": 64,
        "kv_eviction_prefill_interval": 256,
        "kv_eviction_every": 0,
        "kv_eviction_protect_first": 32,
        "kv_eviction_when": "always",
        "kv_eviction_at": {"text": "\n\nQuestion:"},
    },
}
BODIES = [body for _, bodies in RECIPES.values() for body in bodies] + [ALL_KEYS]


def flags(folder: Path, **changes: str | None) -> list[str]:
    """All flags of eviction with their values; None leaves one away."""
    values = {name: value.replace("FOLDER", str(folder)) for name, value in VALUES.items()}
    given = {name: value for name, value in (values | changes).items() if value is not None}
    return [word for name, value in given.items() for word in (flag(name), value)]


def has_mapping(body: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in body["vllm_xargs"].values())


def status(server: Server, body: dict[str, Any]) -> int:
    """HTTP status of a request with a document of :data:`LENGTH` tokens."""
    asked = of_length(body, LENGTH) | dict(model="tiny", max_tokens=4, temperature=0)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        answer = server.post(path, asked | dict(ignore_eos=True))
    except urllib.error.HTTPError as error:
        return error.code
    assert answer["usage"]["completion_tokens"] == 4
    return 200


def test_no_flag_and_no_key_is_left_out() -> None:
    assert set(VALUES) == set(EvictionConfig.model_fields)
    assert set(ALL_KEYS["vllm_xargs"]) == set(KEYS)  # type: ignore[arg-type]
    assert sum(map(has_mapping, BODIES)) == 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capped, growing", [(False, False), nightly(True, False), (False, True)])
def test_requests_are_answered_before_and_after_the_rollback(
    tiny_model: Path, tmp_path: Path, capped: bool, growing: bool
) -> None:
    """Without a cap a request may stay whole; with one it is refused until the rollback."""
    changes = {"allow": "snapkv"} if capped else {"max_budget": None}
    if growing:
        changes |= GROWING
    words = [*FLAGS, *flags(tmp_path / "stores", **changes)]
    with Server(tiny_model, words, tmp_path / "before.log") as server:
        for body in BODIES:
            whole = body["vllm_xargs"].get("kv_eviction") == "none"
            assert status(server, body) == (400 if capped and whole else 200), body
        assert server.evictions()["evictions"] > 0

    # Every flag, whether the others go together or not.
    together = {"every": "256", "policy": "none", "attention": "triton"}
    words = [*FLAGS, *flags(tmp_path / "stores", **together)]
    with Server(tiny_model, words, tmp_path / "after.log") as server:
        assert [status(server, body) for body in BODIES] == [200] * len(BODIES)
        assert "vllm_kvevict" not in server.metrics()
    log = (tmp_path / "after.log").read_text()
    assert "KV eviction is off" in log and "KV eviction is on" not in log


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plugins", ["kvevict", ""])
def test_without_the_flag_only_mappings_are_refused(
    tiny_model: Path, tmp_path: Path, plugins: str
) -> None:
    """Stock vLLM, and the plugin without ``--kv-eviction``: what the pages say of both."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    (shown,) = re.findall(r"HTTP 400 to a mapping, such as `\"kv_eviction_at\": (.*?)`", page)
    assert isinstance(json.loads(shown), dict)
    env = {"VLLM_PLUGINS": plugins}
    with Server(tiny_model, FLAGS, tmp_path / "log", env=env) as server:
        for body in BODIES:
            assert status(server, body) == (400 if has_mapping(body) else 200), body
