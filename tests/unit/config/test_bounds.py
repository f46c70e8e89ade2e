"""What a client may choose under ``--kv-eviction-max-budget``: one list of bounds, each tried on
both sides, and the work that is left to choose."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.snippets import ROOT
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import KEYS, RequestOptions, parse_options
from vllm_kvevict.rules.progress import EvictionProgress

PROMPT, BLOCK, WINDOW = 1000, 32, 32


def server(cap: int | str | None, **settings: Any) -> EvictionConfig:
    base = dict(policy="snapkv", budget=128, interval=64, allow="streaming-llm")
    config = EvictionConfig.parse(base | settings | dict(max_budget=cap))
    assert config is not None
    return config


@dataclass(frozen=True)
class Bound:
    """Values of one key that a server takes, and their neighbours that it refuses.

    ``free`` are values that the same server takes, and refuses, without its cap.
    """

    key: str
    taken: list[Any]
    refused: list[Any]
    free: tuple[list[Any], list[Any]]
    cap: int | str = 256
    server: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ",".join(f"{name}={value}" for name, value in self.server.items())
        return f"{self.key}[{self.cap}{',' if where else ''}{where}]"


BOUNDS = [
    Bound("kv_eviction", ["snapkv", "streaming-llm"], ["none", "h2o"], (["snapkv"], ["h2o"])),
    # More than the window, at most the cap, in tokens of this prompt.
    Bound("kv_eviction_budget", [33, 256], [32, 257], ([33, 10**6], [32])),
    Bound("kv_eviction_budget", ["25.6%"], ["25.7%"], (["100%"], ["0%", "101%"])),
    Bound("kv_eviction_budget", [33, 500, "50%"], [32, 501, "51%"], ([10**6], []), cap="50%"),
    # Four windows, or the server's own interval if it is shorter; at most the server's own.
    Bound("kv_eviction_interval", [64], [0, 1, 63, 65], ([0, 1, 10**6], [-1])),
    Bound(
        "kv_eviction_interval", [128, 512], [0, 1, 127, 513], ([0, 1, 10**6], [-1]),
        server=dict(interval=512),
    ),
    Bound(
        "kv_eviction_interval", [0, 128, 10**6], [1, 127], ([0, 1, 10**6], [-1]),
        server=dict(interval=0),
    ),
    Bound(
        "kv_eviction_interval", [0, 400], [1, 399], ([0, 1], [-1]),
        server=dict(interval=0, window=100),
    ),
    # The same inside the prompt, where the lower bound holds without a cap, too.
    Bound("kv_eviction_prefill_interval", [0, 128, 10**6], [1, 127], ([0, 128], [1, 127])),
    Bound(
        "kv_eviction_prefill_interval", [64], [0, 1, 63, 65], ([0, 64, 10**6], [1, 63]),
        server=dict(prefill_interval=64),
    ),
    Bound(
        "kv_eviction_prefill_interval", [128, 512], [0, 1, 127, 513], ([0, 128, 10**6], [1, 127]),
        server=dict(prefill_interval=512),
    ),
    # Only a server that evicts at fixed positions itself lets requests choose others.
    Bound("kv_eviction_every", [0], [1, 128], ([0], [1, 128])),
    Bound(
        "kv_eviction_every", [64], [0, 1, 63, 65], ([0, 64, 10**6], [1, 63]),
        server=dict(every=64),
    ),
    Bound(
        "kv_eviction_every", [128, 512], [0, 1, 127, 513], ([0, 128, 10**6], [1, 127]),
        server=dict(every=512),
    ),
    # In whole blocks, with the window and one more block.
    Bound("kv_eviction_protect_first", [0, 192], [193], ([0, 10**6], [-1])),
    # The prompt, counted from either end; all of what follows counts if nothing evicts later.
    Bound("kv_eviction_at", [1, 1000, -1, -999], [0, 1001, -1000], ([1, 1000], [0, 1001])),
    Bound(
        "kv_eviction_at", [872, 1000, -1], [1, 871], ([1, 1000], [0, 1001]),
        server=dict(interval=0),
    ),
    Bound("kv_eviction_when", ["always"], ["pressure"], (["always", "pressure"], ["never"])),
    Bound(
        "kv_eviction_when", ["always", "pressure"], ["never"],
        (["always", "pressure"], ["never"]), server=dict(when="pressure"),
    ),
]  # fmt: skip


def parse(config: EvictionConfig, key: str, value: Any) -> RequestOptions:
    return parse_options(config, {key: value}, PROMPT, config.layer_rules(BLOCK, 4))


def check(config: EvictionConfig, key: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert parse(config, key, value) is not None, value
    for value in refused:
        with pytest.raises(ValueError, match=rf"^KV eviction: {key}\b"):
            parse(config, key, value)


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_each_key_has_its_bounds_under_a_cap(bound: Bound) -> None:
    check(server(bound.cap, **bound.server), bound.key, bound.taken, bound.refused)


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_each_key_has_its_bounds_without_a_cap(bound: Bound) -> None:
    check(server(None, **bound.server), bound.key, *bound.free)


def test_every_key_is_bounded() -> None:
    assert {bound.key for bound in BOUNDS} == set(KEYS)


def test_the_page_has_a_row_for_each_key() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.partition("### Bounds of the keys")[2].partition("\n#")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == list(KEYS)


NUMBERS = st.integers(-1200, 1200) | st.sampled_from([0, 1, 31, 32, 63, 64, 127, 128, 256, 10**6])
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "kv_eviction": st.sampled_from(["snapkv", "streaming-llm", "none"]),
        "kv_eviction_budget": NUMBERS | st.floats(0.1, 100).map("{:g}%".format),
        "kv_eviction_interval": NUMBERS,
        "kv_eviction_prefill_interval": NUMBERS,
        "kv_eviction_every": NUMBERS,
        "kv_eviction_protect_first": NUMBERS,
        "kv_eviction_at": NUMBERS,
        "kv_eviction_when": st.sampled_from(["always", "pressure"]),
    },
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    WISHES,
    st.integers(1, 1200),
    st.integers(1, 1200),
    st.sampled_from([0, 20, 64, 128, 500]),
    st.sampled_from([0, 20, 64, 128, 500]),
    st.sampled_from([256, "60%"]),
)
def test_no_choice_evicts_more_often_than_the_bounds_say(
    asked: dict[str, Any], prompt: int, answer: int, interval: int, inside: int, cap: Any
) -> None:
    """Evictions of each accepted request are counted one by one, token by token."""
    config = server(cap, interval=interval, prefill_interval=inside)
    try:
        options = parse_options(config, asked, prompt, config.layer_rules(BLOCK, 1))
    except ValueError:
        return
    assert options.evicts
    request = EvictionProgress(
        options.own_rule(config.rule(BLOCK)), prompt, prompt, options.at, prompt + answer
    )
    in_prompt = in_answer = 0
    for n in range(1, prompt + answer + 1):
        if request.is_due(n):
            request.evict(n)
            in_prompt += n <= prompt
            in_answer += n > prompt
    shortest = min(4 * WINDOW, interval or 4 * WINDOW)
    streamed = min(4 * WINDOW, inside or 4 * WINDOW)
    assert in_answer <= 1 + answer // shortest
    # One at the point of the request's own, and one at the end.
    assert in_prompt <= 2 + prompt // streamed
