"""What a client may choose under ``--kv-eviction-max-budget``: one list of bounds, each tried on
both sides, and the work that is left to choose."""

from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.snippets import ROOT
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import KEYS, RequestOptions, parse_options
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule

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
    # The server's own.
    Bound("kv_eviction_interval", [64], [0, 1, 63, 65], ([0, 1, 10**6], [-1])),
    Bound(
        "kv_eviction_interval", [512], [0, 128, 511, 513], ([0, 1, 10**6], [-1]),
        server=dict(interval=512),
    ),
    Bound(
        "kv_eviction_interval", [0], [1, 127, 128, 10**6], ([0, 1, 10**6], [-1]),
        server=dict(interval=0),
    ),
    Bound(
        "kv_eviction_interval", [], [0, 64, 128], ([0, 1], [-1]),
        server=dict(every=64),
    ),
    # The same inside the prompt; without a cap four windows, or the server's own if it is shorter.
    Bound("kv_eviction_prefill_interval", [0], [1, 127, 128, 10**6], ([0, 128], [1, 127])),
    Bound(
        "kv_eviction_prefill_interval", [64], [0, 1, 63, 65], ([0, 64, 10**6], [1, 63]),
        server=dict(prefill_interval=64),
    ),
    Bound(
        "kv_eviction_prefill_interval", [512], [0, 128, 511, 513], ([0, 128, 10**6], [1, 127]),
        server=dict(prefill_interval=512),
    ),
    Bound(
        "kv_eviction_prefill_interval", [], [0, 128], ([0, 128], [1]),
        server=dict(every=64),
    ),
    # Only a server that evicts at fixed positions itself lets requests choose others.
    Bound("kv_eviction_every", [0], [1, 128], ([0], [1, 128])),
    Bound(
        "kv_eviction_every", [64], [0, 1, 63, 65], ([0, 64, 10**6], [1, 63]),
        server=dict(every=64),
    ),
    Bound(
        "kv_eviction_every", [512], [0, 128, 511, 513], ([0, 128, 10**6], [1, 127]),
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
    Bound(
        "kv_eviction_at", [], [1, 872, 1000, -1], ([1, 1000], [0, 1001]),
        server=dict(every=64),
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
    # Intervals are whole blocks. A prompt that is too short evicts when the answer is long enough.
    assert in_answer <= 1 + (answer // interval if interval else 0)
    # One at the point of the request's own, and one at the end.
    assert in_prompt <= 2 + (prompt // inside if inside else 0)


AT_BOUNDS: dict[str, list[Any]] = {
    "kv_eviction": ["streaming-llm", "none"],
    "kv_eviction_budget": [33, 256, "25.6%"],
    "kv_eviction_interval": [0, 1, 64, 512],
    "kv_eviction_prefill_interval": [0, 64, 512],
    "kv_eviction_every": [0, 64, 512],
    "kv_eviction_protect_first": [96, 192],
    "kv_eviction_when": ["always", "pressure"],
    "kv_eviction_at": [1, 300, 872, PROMPT],
}
ANSWER = 1200


def wishes() -> list[dict[str, Any]]:
    """All combinations of up to three keys at their bounds; fails for a key that is not there."""
    return [
        dict(zip(keys, values, strict=True))
        for count in range(4)
        for keys in combinations(KEYS, count)
        for values in product(*(AT_BOUNDS[key] for key in keys))
    ]


def use(rule: EvictionRule, at: int | None = None) -> tuple[list[int], int]:
    """What a request holds in tokens after each of its tokens, and its number of evictions."""
    ends, held, evictions = PROMPT + ANSWER, [0], 0
    request = EvictionProgress(rule, PROMPT, PROMPT, at, ends)
    for n in range(1, ends):
        if request.is_due(n):
            request.evict(n)
            evictions += 1
        held.append(n - request.tail_start + request.store_blocks * rule.page_tokens)
    return held, evictions


CAPPED: list[dict[str, Any]] = [
    dict(),
    dict(interval=0),
    dict(interval=512),
    dict(every=64),
    dict(every=512, interval=0),
    dict(prefill_interval=64),
    dict(prefill_interval=512, interval=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("cap", [256, "25.6%"])
@pytest.mark.parametrize("flags", CAPPED, ids=str)
def test_no_choice_keeps_more_than_the_cap_or_evicts_more_than_the_server(
    flags: dict[str, Any], cap: int | str
) -> None:
    """Token by token: the cap and what comes between two evictions of the server."""
    config = server(cap, **flags)
    rules, rule = config.layer_rules(BLOCK, 1), config.rule(BLOCK)
    # The least that a request may keep evicts first.
    _, most = use(RequestOptions("snapkv", budget=WINDOW + 1).own_rule(rule))
    seen: set[RequestOptions] = set()
    for asked in wishes():
        try:
            options = parse_options(config, asked, PROMPT, rules)
        except ValueError:
            continue
        assert options.evicts and options.when == "always"
        if options in seen:
            continue
        seen.add(options)
        held, evictions = use(options.own_rule(rule), options.at)
        assert evictions <= most + (options.at is not None), asked
        for n, tokens in enumerate(held):
            length = max(n, PROMPT)
            allowed = 256 if isinstance(cap, int) else max(128, int(0.256 * length))
            if n <= PROMPT:
                between = flags.get("every") or flags.get("prefill_interval") or PROMPT
            else:
                between = flags.get("every") or flags.get("interval", 64) or n - PROMPT
            # Whole blocks: of the store, of the window, and of the interval.
            assert tokens <= allowed + between + 2 * BLOCK, (asked, n)
    assert len(seen) > 5 and most
