"""The ladder of a request: which budgets, where it waits, and what is chosen."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benchmarks.bare_scheduler import Setup, eviction_config, make_request
from vllm_kvevict.settings.requests import parse_options
from vllm_kvevict.target.ladder import SHORT, WHOLE, Ladder, build

SERVER = Setup(window=32, block_size=16, budget=256, target=0.03)


@pytest.fixture(autouse=True)
def hashes() -> None:
    """As an engine begins them."""
    init_none_hash(sha256)


def ladder(
    length: int, asked: dict[str, Any] | None = None, server=SERVER, **more
) -> Ladder | None:
    config = eviction_config(server).model_copy(update=more)
    rules = {0: config.timeline(server.block_size)}
    request = make_request(server, "r", list(range(2, 2 + length)), 20, asked=asked)

    def read(share: str):
        mine = {k: v for k, v in (asked or {}).items() if k != "kv_eviction_target"}
        mine["kv_eviction_budget"] = share
        return parse_options(config, mine, length, list(rules.values()))

    options = parse_options(config, asked, length, list(rules.values()))
    capped = config.max_budget is not None
    return build(request, options, read, rules, length + 20, server.block_size, capped)


@pytest.mark.parametrize(
    "length, shares",
    [
        (40, None),  # 50% are 20 tokens: fewer than the window.
        (64, None),
        (66, ["50%"]),  # 33 tokens: a block and the window leave one block.
        (300, ["12.5%", "25%", "50%"]),
        (528, ["6.25%", "12.5%", "25%", "50%"]),
    ],
)
def test_budgets_that_keep_more_than_the_window_and_not_all(length, shares):
    found = ladder(length)
    assert (found and [rung.share for rung in found.rungs]) == shares


@pytest.mark.parametrize("length, hold", [(300, 256), (304, 272), (305, 272), (320, 288)])
def test_it_waits_before_its_window(length, hold):
    assert ladder(length).hold == hold
    assert ladder(900, {"kv_eviction_at": length}).hold == hold


def test_an_eviction_point_and_what_follows():
    end, point = ladder(400), ladder(600, {"kv_eviction_at": 400})
    assert (end.end, end.inside) == (400, False) and (point.end, point.inside) == (400, True)
    assert end.key != point.key, "scores differ where the prompt goes on"
    assert ladder(600, {"kv_eviction_at": 400, "kv_eviction_interval": 0}).key == point.key
    others = [dict(kv_eviction_protect_first=4), dict(kv_eviction_target=0.1)]
    assert len({ladder(400, asked).key for asked in ({}, *others)}) == 3


def test_a_cap_leaves_out_what_is_above():
    found = ladder(1000, max_budget=300)
    assert [rung.share for rung in found.rungs] == ["6.25%", "12.5%", "25%"]
    assert found.whole == SHORT and ladder(1000).whole == WHOLE


def test_protected_tokens_must_fit():
    found = ladder(1000, {"kv_eviction_protect_first": 100})
    assert [rung.share for rung in found.rungs] == ["25%", "50%"]


def test_the_last_step_evicts_nothing():
    config = eviction_config(SERVER)
    rules = {0: config.timeline(16)}
    request = make_request(SERVER, "r", list(range(2, 502)), 1)
    options = parse_options(config, None, 500, [rules[0]])
    assert build(request, options, lambda share: options, rules, 501, 16, False) is None


def test_the_smallest_that_passes_once_all_below_have_failed():
    one = replace(ladder(528), nats={})
    assert one.passed is None and len(one.open) == 4
    one.nats["25%"] = 0.02
    assert one.passed.share == "25%" and [rung.share for rung in one.open] == ["6.25%", "12.5%"]
    one.nats["6.25%"] = 0.5
    assert [rung.share for rung in one.open] == ["12.5%"]
    one.nats["12.5%"] = 0.03
    assert one.passed.share == "12.5%" and one.open == []
