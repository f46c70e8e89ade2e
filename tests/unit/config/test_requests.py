"""What a request may ask for: every value read or refused in one sentence."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.config.requests import KEYS, RequestOptions, asks, parse_options
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.serving.profile import SHIPPED, read

BLOCK = 32


def server(**settings: Any) -> EvictionConfig:
    base = {"policy": "snapkv", "budget": 128, "interval": 64, "allow": "streaming-llm,none"}
    config = EvictionConfig.parse(base | settings)
    assert config is not None
    return config


def rules(config: EvictionConfig) -> tuple[EvictionRule, ...]:
    return config.layer_rules(BLOCK, 8)


def parse(prompt_len: int = 1000, config: EvictionConfig | None = None, **given: Any) -> Any:
    extra_args = {f"kv_eviction{'_' if key else ''}{key}": value for key, value in given.items()}
    return parse_options(config or server(), extra_args, prompt_len, rules(config or server()))


def complaint(prompt_len: int = 1000, config: EvictionConfig | None = None, **given: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse(prompt_len, config, **given)
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert message.startswith("KV eviction: kv_eviction") and "\n" not in message
    return message


def policy(value: Any) -> dict[str, Any]:
    """The key without a suffix, which no keyword can spell."""
    return {"": value}


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"kv_transfer_params": {"a": 1}}])
def test_a_request_that_says_nothing_gets_the_servers_settings(extra):
    assert not asks(extra)
    options = parse_options(server(), extra, 5, rules(server()))
    assert options == RequestOptions("snapkv")
    rule = server().rule(BLOCK)
    assert options.own_rule(rule) is rule


def test_every_key_reaches_its_field():
    given = dict(budget=320, interval=16, protect_first=64, at=500, prefill_interval=200)
    expected = RequestOptions("streaming-llm", 320, 16, 64, 500, prefill_interval=200)
    assert parse(**policy("streaming-llm"), **given) == expected
    as_text = {key: str(value) for key, value in given.items()}
    assert parse(**policy("streaming-llm"), **as_text) == expected
    as_float = {key: float(value) for key, value in given.items()}
    assert parse(**policy("streaming-llm"), **as_float) == expected
    assert expected.own_rule(server().rule(BLOCK)) == EvictionRule(
        BLOCK, 32, 16, budget_tokens=320, prefill_interval=200, protect_first=64
    )


def test_a_share_replaces_tokens_and_the_other_way_round():
    rule = server().rule(BLOCK)
    shared = parse(budget="25%").own_rule(rule)
    assert (shared.budget_tokens, shared.budget_share) == (None, 0.25)
    back = parse(budget=200, config=server(budget="10%")).own_rule(shared)
    assert (back.budget_tokens, back.budget_share) == (200, None)


@pytest.mark.parametrize("value", ["nope", "ada-snapkv", "", 3, None, ["snapkv"], "None"])
def test_a_policy_that_the_server_does_not_allow(value):
    message = complaint(**policy(value))
    assert "(snapkv, streaming-llm, none)" in message and repr(value) in message
    alone = complaint(config=server(allow=""), **policy("streaming-llm"))
    assert "(snapkv)" in alone
    assert "(snapkv)" in complaint(config=server(allow=""), **policy("none"))


@pytest.mark.parametrize("value", ["x", "0%", "101%", "-5", -5, 0, 1.5, None, [128], True, "nan%"])
def test_bad_budget(value):
    assert "kv_eviction_budget" in complaint(budget=value)


def test_a_budget_needs_room_beside_the_window():
    assert "give at least 33" in complaint(budget=32)
    assert parse(budget=33).budget == 33
    assert parse(prompt_len=10, budget="1%").budget == "1%"


@pytest.mark.parametrize("key", ["interval", "prefill_interval", "protect_first", "at"])
@pytest.mark.parametrize(
    "value", ["x", "", "1.5", 1.5, None, [1], True, float("nan"), float("inf"), 1e300, "9" * 99]
)
def test_not_a_whole_number(key, value):
    assert f"kv_eviction_{key} must be a whole number" in complaint(**{key: value})


@pytest.mark.parametrize("key", ["interval", "prefill_interval", "protect_first"])
def test_below_zero(key):
    assert f"kv_eviction_{key} must be at least 0" in complaint(**{key: -1})


@pytest.mark.parametrize("value, point", [(1, 1), (1000, 1000), (-1, 999), (-999, 1), ("-10", 990)])
def test_the_point_counts_from_either_end(value, point):
    assert parse(at=value).at == point


@pytest.mark.parametrize("value", [0, 1001, -1000, -5000, "0"])
def test_a_point_outside_the_prompt(value):
    message = complaint(at=value)
    assert "between 1 and the prompt's 1000 tokens, or between -999 and -1" in message


def test_the_store_grows_by_what_is_protected():
    for first, blocks in ((0, 3), (1, 4), (32, 4), (33, 5), (96, 6), (900, 32)):
        rule = parse(protect_first=first).own_rule(server().rule(BLOCK))
        assert rule.store_blocks(1000) == blocks, first
    # A share of what comes before the point: 25% of 512 tokens.
    rule = parse(budget="25%", at=512, protect_first=97).own_rule(server().rule(BLOCK))
    assert rule.store_blocks(512) == 3 + 4
    assert parse(**policy("none"), protect_first=10**6).policy == "none"


def test_no_more_than_the_prompt_is_protected():
    assert parse(protect_first=10**6).protect_first == 1000
    assert not parse(protect_first=10**6).own_rule(server().rule(BLOCK)).evictable(1000)


def test_subgen_stream_keeps_its_slots_besides_protected_tokens():
    config = server(policy="subgen-stream")
    assert parse(config=config, protect_first=500).protect_first == 500
    config = server(policy="subgen-stream", options={"cluster_samples": 16})
    for first in (0, 500):
        asked = {"kv_eviction_protect_first": first, "kv_eviction_budget": 64}
        assert parse_options(config, asked, 1000, config.layer_rules(16, 8)).protect_first == first
        with pytest.raises(ValueError, match=r"budget 63 leaves 16 tokens outside.*needs 18"):
            parse_options(
                config, asked | {"kv_eviction_budget": 63}, 1000, config.layer_rules(16, 8)
            )


def test_a_cap_compares_tokens_of_this_prompt():
    config = server(allow="streaming-llm", max_budget=256)
    assert parse(config=config, budget=256).budget == 256
    assert "at most 256, here 256 tokens" in complaint(config=config, budget=257)
    assert parse(config=config, budget="25%").budget == "25%"
    assert "is 260 tokens here" in complaint(config=config, budget="26%")
    assert parse(config=config, budget="50%", at=512).at == 512
    shared = server(allow="", max_budget="25%")
    assert parse(config=shared, budget=250).budget == 250
    assert "at most 25%, here 250 tokens" in complaint(config=shared, budget=251)
    assert "here 125 tokens" in complaint(config=shared, budget=126, at=500)


def test_when_is_the_servers_unless_the_request_says_otherwise():
    under_pressure = server(when="pressure")
    assert parse().when == "always" and parse(config=under_pressure).when == "pressure"
    assert parse(when="pressure").when == "pressure"
    assert parse(config=under_pressure, when="always").when == "always"
    for value in ("never", "", 1, None, ["always"]):
        assert "must be always or pressure on this server" in complaint(when=value)


def test_a_cap_cannot_be_evaded_by_waiting_for_pressure():
    always = server(allow="", max_budget=256)
    assert "kv_eviction_when must be always on this server" in complaint(
        config=always, when="pressure"
    )
    assert parse(config=always, when="always").when == "always"
    both = server(allow="", max_budget=256, when="pressure")
    assert parse(config=both).when == "pressure", "it is the server's own setting"


def test_a_cap_cannot_be_evaded_by_evicting_less_often():
    config = server(allow="", max_budget=256)
    for value in (0, 65):
        assert "must be 64 decode steps" in complaint(config=config, interval=value)
    assert parse(config=config, interval=64).interval == 64
    once = server(allow="", max_budget=256, interval=0)
    assert parse(config=once, interval=0).interval == 0


def test_a_cap_cannot_be_evaded_by_an_early_point_on_a_server_that_evicts_once():
    once = server(allow="", max_budget=256, interval=0)
    for asked in ({}, {"interval": 0}):
        message = complaint(config=once, at=1, **asked)
        assert "hold 1000 tokens of its prompt" in message and "at most 256 tokens" in message
        assert "hold 429 tokens" in complaint(config=once, at=699, **asked)
    assert parse(config=once, at=-128).at == 872, "128 of the context, and 128 behind it"
    assert "hold 257 tokens" in complaint(config=once, at=-129)
    assert parse(config=once, at=-1).at == 999, "nothing is shorter behind a point"
    assert parse(config=once, at=-192, budget=64).at == 808
    assert parse(256, config=once, at=1).at == 1, "a prompt that the cap holds whole"
    shared = server(allow="", max_budget="20%", interval=0)
    assert parse(config=shared, at=-72).at == 928
    assert "at most 200 tokens" in complaint(config=shared, at=-73)
    often = server(allow="", max_budget=256)
    assert parse(config=often, at=1).at == 1, "the next eviction follows the prefill"
    assert parse(config=server(interval=0), at=1).at == 1, "no cap"


@pytest.mark.parametrize(
    "key", ["kv_eviction_bidget", "kv_eviction_", "kv_evictions", "kv_eviction.at"]
)
def test_unknown_keys_name_the_known_ones(key):
    assert asks({key: 1})
    with pytest.raises(ValueError, match=r"unknown key") as caught:
        parse_options(server(), {key: 1}, 100, rules(server()))
    for known in KEYS:
        assert known in str(caught.value)


def pyramid_server(**settings: Any) -> EvictionConfig:
    return server(policy="ada-pyramid", budget=1056, allow="snapkv", **settings)


def test_a_group_has_its_part_of_what_the_request_asks_for():
    config = pyramid_server()
    first, last = rules(config)[0], rules(config)[-1]
    assert (first.store_blocks(9000), last.store_blocks(9000)) == (58, 6)
    assert parse(9000, config).own_rule(first) is first
    half = parse(9000, config, budget=544)
    assert [half.own_rule(rule).store_blocks(9000) for rule in (first, last)] == [29, 3]
    share = parse(9000, config, budget="25%")
    stores = [share.own_rule(rule).store_blocks(9000) for rule in rules(config)]
    assert sum(stores) == pytest.approx(8 * (2250 - 32) / BLOCK, abs=2)
    assert stores == sorted(stores, reverse=True) and len(set(stores)) == 4


def test_under_another_policy_every_group_has_the_whole_budget():
    config = pyramid_server()
    options = parse(9000, config, **policy("snapkv"))
    assert {options.own_rule(rule) for rule in rules(config)} == {config.rule(BLOCK)}


def test_every_group_grows_by_what_is_protected():
    config = pyramid_server()
    for first in (1, 193, 4000):
        options = parse(9000, config, protect_first=first)
        for rule in rules(config):
            more = options.own_rule(rule).store_blocks(9000) - rule.store_blocks(9000)
            assert more == -(-first // BLOCK)


CAPS = [200, 640, "20%", "60%"]


@pytest.mark.parametrize("cap", [*CAPS, None])
@pytest.mark.parametrize("budget", [96, 128, "12%", "20%,min=200"])
def test_protected_tokens_and_the_budget_stay_within_the_cap(cap, budget):
    """Block by block: the sum, what the policy keeps, and that only the cap refuses."""
    try:
        config = server(allow="", budget=budget, max_budget=cap)
    except ValueError:
        pytest.skip("the server's own budget is above the cap")
    refused = grown = 0
    for prompt in (40, 90, 300, 1000, 3000):
        own = config.rule(BLOCK).budget(prompt)
        limit = cap if isinstance(cap, int) else int(prompt * float((cap or "0%")[:-1]) / 100)
        for first in (0, 1, 31, 32, 33, 64, 100, 200, 500, 2000):
            pages = -(-min(first, prompt) // BLOCK)
            try:
                rule = parse(prompt, config, protect_first=first).own_rule(config.rule(BLOCK))
            except ValueError as error:
                refused += 1
                assert first and "kv_eviction_protect_first" in str(error)
                assert f"--kv-eviction-max-budget {cap}" in str(error)
                assert max(limit, own) < pages * BLOCK + 64
                continue
            store = rule.store_blocks(prompt)
            assert store > pages, "the policy has a page of its own"
            grown += store > config.rule(BLOCK).store_blocks(prompt)
            if cap is None:
                assert store == pages + config.rule(BLOCK).store_blocks(prompt)
            elif own > 64 and pages:
                assert store * BLOCK + 32 <= max(limit, own) or not rule.evictable(prompt)
    assert grown or cap in (200, "20%"), "a budget at the cap does not grow"
    assert refused or cap is None or budget == "20%,min=200"


def shipped_profile() -> Profile:
    return read(SHIPPED / "SmolLM2-135M-Instruct.json")


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize("prompt", [60, 300, 1000, 3000, 8000])
@pytest.mark.parametrize(
    "settings, first",
    [
        (dict(budget="25%,min=512", max_budget="50%"), [32, 64, 96, 128, 160, 200]),
        (dict(budget="25%,min=1024", allow="none"), [100, 300, 1000, 4000]),
        (dict(budget=2048, interval=256), [200, 1000]),
        (dict(budget=2048, prefill_interval=2048), [200, 1000]),
    ],
)
def test_the_recipes_protect_their_system_prompts(settings, first, prompt, profile):
    learned = dict(policy="probe", profile=shipped_profile())
    settings = dict(policy="ada-defensive", allow="") | settings | (learned if profile else {})
    config = server(**settings)
    groups = config.layer_rules(BLOCK, 30)
    for tokens in first:
        asked = {"kv_eviction_protect_first": tokens}
        options = parse_options(config, asked, prompt, groups)
        assert options.protect_first == min(tokens, prompt)
        for rule in set(groups):
            assert options.own_rule(rule).store_blocks(prompt) * BLOCK > options.protect_first


def test_a_cap_is_one_of_the_mean_over_all_layers():
    config = pyramid_server(max_budget=1056)
    assert parse(9000, config, budget=1056).budget == 1056
    message = complaint(9000, config, budget=1057)
    assert "is 1057 tokens here" in message and "here 1056 tokens" in message


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2000, 2000),
    st.floats(),
    st.text(max_size=6),
    st.integers(-2000, 2000).map(str),
    st.floats(-5, 120).map(lambda share: f"{share}%"),
    st.sampled_from(["snapkv", "streaming-llm", "ada-snapkv", "none"]),
    st.lists(st.integers(), max_size=2),
)


@given(
    st.dictionaries(st.sampled_from([*KEYS, "kv_eviction_x", "other"]), VALUES),
    st.integers(1, 1500),
    st.sampled_from([None, 200, "40%"]),
)
def test_accepts_what_the_rule_can_follow_or_complains_in_one_line(given, prompt_len, cap):
    config = server(allow="streaming-llm", max_budget=cap)
    try:
        options = parse_options(config, given, prompt_len, rules(config))
    except ValueError as error:
        message = str(error)
        assert message.startswith("KV eviction: ") and len(message.splitlines()) == 1
        assert any(key in message for key in given)
        return
    assert "kv_eviction_x" not in given
    assert options.policy in config.choices
    assert options.at is None or 0 < options.at <= prompt_len
    rule = options.own_rule(config.rule(BLOCK))
    length = options.at or prompt_len
    assert options.protect_first < rule.store_blocks(length) * BLOCK
    assert rule.budget_tokens is None or rule.budget_tokens > config.window
    if cap is not None and options.budget is not None:
        most = cap if isinstance(cap, int) else int(length * 0.4)
        assert rule.budget(length) <= most
        # However long the answer.
        assert rule.budget(10**6) <= (cap if isinstance(cap, int) else 400_000)
    if isinstance(cap, int) and options.protect_first:
        for n in (length, 10**6):
            assert rule.chosen(n) + rule.first_blocks * BLOCK <= cap


@given(st.integers(1, 5000), st.data())
def test_points_from_the_end_are_pythons_indices(prompt_len, data):
    assume(prompt_len > 1)
    back = data.draw(st.integers(1, prompt_len - 1))
    point = parse(prompt_len, at=-back).at
    assert list(range(prompt_len))[:point] == list(range(prompt_len))[:-back]


def test_evictions_inside_the_prompt_need_a_budget_in_tokens_and_no_pressure():
    inside = server(prefill_interval=256)
    assert parse(config=inside, budget="25%", prefill_interval=0).prefill_interval == 0
    assert parse(config=server(budget="25%"), budget=200, prefill_interval=128).budget == 200
    for config, asked in (
        (inside, {"budget": "25%"}),
        (inside, {"when": "pressure"}),
        (server(when="pressure"), {"prefill_interval": 128}),
        (server(budget="25%"), {"prefill_interval": 128}),
    ):
        with pytest.raises(ValueError, match="cannot be combined with evictions inside") as caught:
            parse(config=config, **asked)
        assert "kv_eviction_prefill_interval 0" in str(caught.value)
    capped = server(allow="", max_budget="50%", prefill_interval=256)
    for value in (0, 127, 257):
        assert "must be 256 prompt tokens" in complaint(config=capped, prefill_interval=value)
    assert parse(config=capped, prefill_interval=256).prefill_interval == 256


def test_fixed_positions_or_points_and_intervals_of_its_own():
    config = server(every=256)
    rule = config.rule(BLOCK)
    assert parse(config=config).own_rule(rule).every == 256
    assert parse(config=config, every=128).own_rule(rule).every == 128
    for own in (dict(at=500), dict(interval=16), dict(prefill_interval=200)):
        assert parse(config=config, **own).own_rule(rule).every == 0, "as on other servers"
        (key,) = own
        message = complaint(config=config, every=128, **own)
        assert f"kv_eviction_{key} cannot be combined with kv_eviction_every 128" in message
    assert "kv_eviction_every 0" in complaint(config=config, when="pressure")
    assert parse(config=config, when="pressure", every=0).own_rule(rule).every == 0
    assert "--kv-eviction-every" in complaint(every=128)


@pytest.mark.parametrize("given", [dict(budget="25%"), dict(when="always", prefill_interval=128)])
def test_a_request_that_never_evicts_has_a_rule_all_the_same(given):
    """The scheduler asks every request for it."""
    for config in (server(prefill_interval=256), server(budget="25%")):
        for rule in rules(config):
            options = parse(config=config, **policy("none"), **given)
            assert options.own_rule(rule) == RequestOptions("none").own_rule(rule) == rule
    assert "must be at least 0" in complaint(**policy("none"), interval=-1)


def test_clients_do_not_make_a_prompt_evict_without_end():
    """Four windows at least, or what the server does itself."""
    for value in (1, 31, 127):
        assert "must be 0, or at least 128 prompt tokens" in complaint(prefill_interval=value)
    assert parse(prefill_interval=128).prefill_interval == 128
    own = server(prefill_interval=64)
    assert "at least 64 " in complaint(config=own, prefill_interval=63)
    assert parse(config=own, prefill_interval=64).prefill_interval == 64
    assert parse(config=own, prefill_interval=0).prefill_interval == 0


def test_a_sentence_stays_short_whatever_it_quotes():
    long = "x" * 3_000_000
    for asked in (
        policy(long), dict(budget=long), dict(interval=long), dict(at=long), dict(when=long),
        dict(protect_first=[1] * 1_000_000),
        dict(budget=10**30), dict(budget=10**5000), dict(interval=10**5000),
    ):  # fmt: skip
        assert len(complaint(**asked)) < 600
    with pytest.raises(ValueError, match="unknown key") as caught:
        parse(**{long: 1})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("server, other", [("probe", "snapkv"), ("snapkv", "probe")])
def test_each_policy_protects_as_many_recent_tokens_as_it_needs(server, other):
    config = EvictionConfig(policy=server, allow=(other,), budget=96)
    rules = [config.rule(16)]
    for policy, recent in (("probe", 8), ("snapkv", 32)):
        options = parse_options(config, {"kv_eviction": policy}, 1000, rules)
        assert options.own_rule(rules[0]).protected == recent
        asked = {"kv_eviction": policy, "kv_eviction_budget": recent}
        with pytest.raises(ValueError, match=rf"{recent} tokens; give at least {recent + 1}"):
            parse_options(config, asked, 1000, rules)
        asked["kv_eviction_budget"] = recent + 1
        assert parse_options(config, asked, 1000, rules).own_rule(rules[0]).store_blocks(1000) == 1
