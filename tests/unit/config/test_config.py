"""Parsing the configuration: values, and one sentence for everything that is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.config.policy_options import PolicyOptions, options_of
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.config.sentences import flag
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.rules.layers import by_layer, pyramid

FIELDS = ["policy", "budget", "window", "interval", "prefill_interval", "every", "when", "profile"]
FIELDS += [
    "calibrate_seconds",
    "allow",
    "max_budget",
    "protect_system",
    "shared_blocks",
    "attention",
    "kernels",
    "ring_memory",
    "store_memory",
    "store_path",
]
FIELDS += ["store_dtype", "audit", "options"]


def parse(**settings: Any) -> EvictionConfig:
    config = EvictionConfig.parse({"policy": "snapkv"} | settings)
    assert config is not None
    return config


def complaint(value: Any) -> str:
    with pytest.raises(ValueError) as caught:
        EvictionConfig.parse(value)
    message = str(caught.value)
    assert message.startswith("KV eviction: ") and "\n" not in message and ". " not in message
    return message


def test_defaults() -> None:
    assert parse().model_dump() == {
        "policy": "snapkv",
        "budget": 1024,
        "window": 32,
        "interval": 128,
        "prefill_interval": 0,
        "every": 0,
        "when": "always",
        "profile": None,
        "calibrate_seconds": 900.0,
        "allow": (),
        "max_budget": None,
        "protect_system": False,
        "shared_blocks": "keep",
        "attention": "auto",
        "kernels": "required",
        "ring_memory": "512M",
        "store_memory": 0,
        "store_path": None,
        "store_dtype": "auto",
        "audit": 0,
        "options": {},
    }
    assert parse().options.model_dump() == {
        "floor": 0.2,
        "pool_kernel": 7,
        "pool": "max",
        "sinks": 4,
        "recent_share": 0.5,
        "random_share": 0.67,
        "seed": 0,
        "radius": 0.0,
        "cluster_samples": 4,
        "value_share": 0.25,
        "probe_window": "auto",
        "probe_recent": 8,
        "beta": 20.0,
        "groups": None,
        "low_mark": 0.05,
        "high_mark": 0.1,
    }


@pytest.mark.parametrize("value", [None, False, "none", "off", {"policy": None}])
def test_off(value: Any) -> None:
    assert EvictionConfig.parse(value) is None


def test_marks_in_order() -> None:
    assert parse(options=dict(low_mark=0.0, high_mark=0.0)).options.high_mark == 0
    for marks in ({"low_mark": 0.2, "high_mark": 0.1}, {"high_mark": 0.01}, {"low_mark": 0.2}):
        message = complaint({"policy": "snapkv", "options": marks})
        assert "--kv-eviction-options: high_mark " in message and " is below low_mark " in message
    for value in (1.0, -0.1, "5%"):
        message = complaint({"policy": "snapkv", "options": {"low_mark": value}})
        assert "--kv-eviction-options: low_mark must be" in message
    assert "--kv-eviction-when" in complaint({"policy": "snapkv", "when": "never"})


def test_evictions_inside_a_prompt_bound_what_it_holds() -> None:
    assert parse(prefill_interval=512).rule(32).prefill_stride == 512
    assert parse(prefill_interval=500).rule(32).prefill_stride == 512, "whole blocks"
    for settings in ({"when": "pressure"}, {"budget": "25%"}):
        message = complaint({"policy": "snapkv", "prefill_interval": 512} | settings)
        assert "--kv-eviction-prefill-interval" in message
        assert ("in tokens, not 25%" in message) == ("budget" in settings)
    assert "--kv-eviction-prefill-interval" in complaint(
        {"policy": "snapkv", "prefill_interval": -1}
    )


def test_evictions_at_fixed_positions_stand_alone() -> None:
    for budget in ("25%", 512):
        assert parse(every=500, budget=budget).rule(32).prefill_stride == 512, "whole blocks"
    for budget, least in (("25%", 128), ("25%,min=40", 40), ("25%,min=200", 200)):
        rule = parse(every=500, budget=budget).rule(32)
        assert [rule.budget(n) for n in (64, 512, 4000)] == [least, max(least, 128), 1000]
    assert parse(budget="25%").rule(32).budget(64) == 16
    for settings in ({"when": "pressure"}, {"prefill_interval": 512}, {"audit": "1%"}):
        message = complaint({"policy": "snapkv", "budget": 512, "every": 512} | settings)
        assert "--kv-eviction-every cannot be combined with --kv-eviction-" in message
    assert "at least 64 tokens" in complaint({"policy": "snapkv", "every": 63, "window": 64})
    assert "--kv-eviction-every" in complaint({"policy": "snapkv", "every": -1})


@pytest.mark.parametrize("policy", ["none", "off", None])
def test_off_beside_other_settings(policy: Any) -> None:
    assert EvictionConfig.parse({"policy": policy, "budget": 512}) is None


def test_a_name_is_a_mapping() -> None:
    assert EvictionConfig.parse("ada-snapkv") == EvictionConfig.parse({"policy": "ada-snapkv"})
    config = parse()
    assert EvictionConfig.parse(config) is config


@pytest.mark.parametrize(
    ("budget", "tokens", "share"),
    [
        (1024, 1024, None),
        ("1024", 1024, None),
        (" 512 ", 512, None),
        ("25%", None, 0.25),
        (" 12.5 %", None, 0.125),
        ("100%", None, 1.0),
        ("0.5%", None, 0.005),
    ],
)
def test_budget(budget: Any, tokens: int | None, share: float | None) -> None:
    config = parse(budget=budget)
    assert config.budget_tokens == tokens
    assert config.budget_share == (pytest.approx(share) if share else None)
    rule = config.rule(32)
    assert rule.budget(2000) == (tokens if tokens else int(2000 * (share or 0)))


@pytest.mark.parametrize(
    "budget",
    ["0%", "101%", "-5%", "nan%", "inf%", "%", "x%", "", "many", "-1", "1.5", 0.25, 512.0, True,
     None, [512], "9" * 5000],
)  # fmt: skip
def test_bad_budget(budget: Any) -> None:
    message = complaint({"policy": "snapkv", "budget": budget})
    assert "--kv-eviction-budget: give tokens (1024) or a share (25%)" in message


@pytest.mark.parametrize("budget", [0, -1, "0"])
def test_budget_below_one_token(budget: Any) -> None:
    message = complaint({"policy": "snapkv", "budget": budget})
    assert "--kv-eviction-budget: must be at least 1 token" in message


@pytest.mark.parametrize(("budget", "window"), [(32, 32), (16, 32), ("31", 32), (64, 100)])
def test_no_room_beside_the_window(budget: Any, window: int) -> None:
    message = complaint({"policy": "snapkv", "budget": budget, "window": window})
    assert f"budget {budget} leaves no room beyond the window of {window} tokens" in message
    assert "raise --kv-eviction-budget or lower --kv-eviction-window" in message
    assert parse(budget=window + 1, window=window).budget_tokens == window + 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("window", 0, "must be greater than or equal to 1"),
        ("window", "32", "must be a valid integer"),
        ("window", 32.0, "must be a valid integer"),
        ("window", True, "must be a valid integer"),
        ("interval", -1, "must be greater than or equal to 0"),
        ("interval", None, "must be a valid integer"),
    ],
)
def test_bad_field(field: str, value: Any, says: str) -> None:
    message = complaint({"policy": "snapkv", field: value})
    assert f"{flag(field)}: {says}, not {value!r}" in message


@pytest.mark.parametrize(
    ("policy", "field", "value", "says"),
    [
        ("ada-snapkv", "floor", -0.1, "must be greater than or equal to 0"),
        ("ada-tova", "floor", 1.1, "must be less than or equal to 1"),
        ("ada-pyramid", "floor", "0.2", "must be a valid number"),
        ("ada-probe", "floor", True, "must be a valid number"),
        ("ada-h2o", "floor", float("nan"), "must be a finite number"),
        ("snapkv", "pool_kernel", 4, "must be odd"),
        ("snapkv", "pool_kernel", 0, "must be greater than or equal to 1"),
        ("snapkv", "pool", "min", "must be 'max' or 'avg'"),
        ("streaming-llm", "sinks", -1, "must be greater than or equal to 0"),
        ("streaming-llm", "sinks", [4], "must be a valid integer"),
        ("h2o", "recent_share", -0.1, "must be greater than or equal to 0"),
        ("nacl", "random_share", 1.5, "must be less than or equal to 1"),
        ("nacl", "random_share", float("inf"), "must be a finite number"),
        ("tova", "groups", 0, "must be greater than or equal to 1"),
        ("tova", "groups", 2.0, "must be a valid integer"),
        ("pyramidkv", "beta", 0.9, "must be greater than or equal to 1"),
        ("ada-pyramid", "beta", float("inf"), "must be a finite number"),
        ("nacl", "seed", -1, "must be greater than or equal to 0"),
        ("nacl", "seed", 2**63, "must be less than 9223372036854775808"),
        ("subgen-stream", "seed", 0.5, "must be a valid integer"),
    ],
)
def test_bad_option(policy: str, field: str, value: Any, says: str) -> None:
    message = complaint({"policy": policy, "options": {field: value}})
    assert f"--kv-eviction-options: {field} {says}, not {value!r}" in message


def test_options_are_those_of_the_policies_that_may_be_chosen() -> None:
    config = parse(options='{"pool": "avg", "groups": 3}')
    assert (config.options.pool, config.options.groups) == ("avg", 3)
    assert parse(allow="ada-tova", options={"floor": 0.5}).options.floor == 0.5
    message = complaint({"policy": "snapkv", "allow": "tova", "options": {"sinks": 4}})
    assert "'sinks' is no option of snapkv, tova, but of streaming-llm" in message
    assert "of snapkv: pool_kernel, pool, groups, low_mark, high_mark; of tova: groups" in message
    message = complaint({"policy": "snapkv", "options": {"colour": 1}})
    assert "'colour' is no option of snapkv (of snapkv: pool_kernel" in message
    for value in ("floor", "[1]", 3, None, [], {1: 2}):
        message = complaint({"policy": "snapkv", "options": value})
        assert "--kv-eviction-options: give a JSON object such as '{\"floor\": 0.2}'" in message
    named = [name for policy in POLICY_NAMES for name in options_of(policy)]
    assert set(named) == set(PolicyOptions.model_fields), "each is read by some policy"


@pytest.mark.parametrize(
    ("value", "allow", "choices"),
    [
        ("", (), ("snapkv",)),
        ("none", ("none",), ("snapkv", "none")),
        (
            " none,streaming-llm ,snapkv,",
            ("snapkv", "streaming-llm", "none"),
            ("snapkv", "streaming-llm", "none"),
        ),
        (["ada-snapkv", "ada-snapkv"], ("ada-snapkv",), ("snapkv", "ada-snapkv")),
    ],
)
def test_allow(value: Any, allow: tuple[str, ...], choices: tuple[str, ...]) -> None:
    config = parse(allow=value)
    assert (config.allow, config.choices) == (allow, choices)
    assert config.policies == tuple(name for name in choices if name != "none")
    assert set(build_policies(config)) == set(config.policies)


@pytest.mark.parametrize("value", ["nope", "snapkv;none", 3, None, {"snapkv": 1}, [3]])
def test_bad_allow(value: Any) -> None:
    assert "--kv-eviction-allow: " in complaint({"policy": "snapkv", "allow": value})


@pytest.mark.parametrize("policy, allow", [("ada-pyramid", ""), ("snapkv", "none,pyramidkv")])
def test_layers_have_budgets_of_their_own_where_a_request_may_ask_for_it(
    policy: str, allow: str
) -> None:
    config = parse(policy=policy, allow=allow, options=dict(groups=3, beta=10.0))
    places = tuple(rule.share for rule in config.layer_rules(32, 6))
    assert places == by_layer(pyramid(6, 10.0), 3, steepest=1.9)
    flat = parse(allow="ada-snapkv,none", options=dict(groups=3))
    assert flat.layer_rules(32, 6) == (flat.rule(32),) * 6


def test_one_group_gives_all_layers_one_budget() -> None:
    model = ModelIdentity(architecture="any", layers=3, kv_heads=2, config="any")
    profile = Profile(model=model, policy="snapkv", budget="25%", layers=(1.5, 1.0, 0.5))
    for groups in (1, 3):
        config = parse(policy="snapkv", profile=profile, options=dict(groups=groups))
        assert config.has_groups == config.keeps_by_layer("snapkv") == (groups > 1)
        rules = config.layer_rules(32, 3)
        assert len(rules) == 3 and len(set(rules)) == groups
    for policy, allow in (("ada-pyramid", ""), ("snapkv", "none,pyramidkv")):
        settings = {"policy": policy, "allow": allow, "options": {"groups": 1}}
        assert "set groups to at least 2 or choose another policy" in complaint(settings)


def test_a_share_of_some_tokens_at_least() -> None:
    for budget in ("25%,min=256", " 25 % ,min= 256"):
        rule = parse(budget=budget).rule(32)
        assert [rule.budget(n) for n in (100, 2000)] == [256, 500]
    for budget in ("25%,min=-1", "25%,min=", "25%,min=2%", "512,min=600", "25%,max=3", ",min=3"):
        assert "--kv-eviction-budget: give tokens" in complaint(
            {"policy": "snapkv", "budget": budget}
        )
    message = complaint({"policy": "snapkv", "max_budget": 128, "budget": "5%,min=200"})
    assert "--kv-eviction-max-budget 128 is below the 200 tokens" in message
    assert parse(max_budget="50%", budget="25%,min=64").budget_share == 0.25
    message = complaint({"policy": "snapkv", "max_budget": "20%", "budget": "25%,min=64"})
    assert "--kv-eviction-max-budget 20% is below the budget of 25%,min=64" in message


def test_max_budget() -> None:
    assert parse(max_budget="2048").max_budget == 2048
    assert parse(max_budget="50%", budget=512).max_budget == "50%"
    message = complaint({"policy": "snapkv", "max_budget": "x"})
    assert "--kv-eviction-max-budget: give tokens (1024) or a share" in message
    for budget, cap in ((512, 511), ("30%", "29.5%")):
        message = complaint({"policy": "snapkv", "budget": budget, "max_budget": cap})
        assert f"--kv-eviction-max-budget {cap} is below the budget of {budget}" in message
    message = complaint({"policy": "snapkv", "allow": "none", "max_budget": 2048})
    assert "--kv-eviction-allow lists none, which --kv-eviction-max-budget rules out" in message


@pytest.mark.parametrize("policy", ["nope", "SnapKV", "", 3, ["snapkv"], {"name": "snapkv"}])
def test_unknown_policy_names_the_valid_ones(policy: Any) -> None:
    message = complaint({"policy": policy})
    assert f"--kv-eviction: unknown policy {policy!r}" in message
    assert (
        "choose from ada-snapkv, snapkv, ada-defensive, defensive, ada-probe, probe, ada-h2o, h2o"
        in message
    )


def test_missing_policy() -> None:
    for value in ({}, {"budget": 512}):
        assert "--kv-eviction is missing; choose from ada-snapkv" in complaint(value)


@pytest.mark.parametrize("key", ["budgets", "kv-eviction-budget", "two\nlines", 1])
def test_unknown_key_names_the_known_ones(key: Any) -> None:
    message = complaint({"policy": "snapkv", key: 1})
    assert f"unknown key {key!r} in 'kv_eviction' (known: {', '.join(FIELDS)})" in message


def test_every_fault_is_named_at_once() -> None:
    message = complaint({"policy": "x", "budget": "x", "window": -1, "colour": "red"})
    for part in ("--kv-eviction:", "--kv-eviction-budget:", "--kv-eviction-window:", "'colour'"):
        assert part in message


@pytest.mark.parametrize("value", [3, True, 1.5, [], ["snapkv"]])
def test_neither_name_nor_mapping(value: Any) -> None:
    message = complaint(value)
    assert f"must be a policy name ({', '.join(POLICY_NAMES)}, auto) or a mapping" in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.sampled_from([*POLICY_NAMES, "nope"]) | JSON,
        "budget": st.integers(-2, 5000) | st.floats(-10, 200).map(lambda x: f"{x}%") | JSON,
        "window": st.integers(-2, 100) | JSON,
        "interval": st.integers(-2, 1000) | JSON,
        "floor": JSON,
        "options": st.fixed_dictionaries(
            {},
            optional={
                "floor": st.floats(-0.5, 1.5) | JSON,
                "pool_kernel": st.integers(-1, 20) | JSON,
                "pool": st.sampled_from(["max", "avg", "min"]) | JSON,
                "sinks": st.integers(-2, 100) | JSON,
            },
        )
        | JSON,
        "allow": st.sampled_from(["none", "snapkv,none", "x"]) | JSON,
        "max_budget": st.integers(-2, 5000) | JSON,
        "colour": JSON,
    },
)


@given(SETTINGS | JSON)
def test_parse_accepts_or_complains_in_one_line(value: Any) -> None:
    try:
        config = EvictionConfig.parse(value)
    except ValueError as error:
        message = str(error)
        assert message.startswith("KV eviction: ") and len(message.splitlines()) == 1
        assert "--kv-eviction" in message or "kv_eviction" in message
        return
    if config is None:
        return
    assert config.policy in (*POLICY_NAMES, "auto")
    assert (config.budget_tokens is None) != (config.budget_share is None)
    assert config.budget_tokens is None or config.budget_tokens > config.window
    assert config.budget_share is None or 0 < config.budget_share <= 1
    assert config.options.pool_kernel % 2 == 1 and 0 <= config.options.floor <= 1
    assert config.rule(16).store_blocks(3000) >= 1
    # What travels to the workers is plain JSON and means the same there.
    assert EvictionConfig.parse(json.loads(json.dumps(config.model_dump()))) == config


def test_the_budget_has_room_beside_the_window_of_every_policy_that_a_request_may_choose():
    """A client that chose snapkv on such a server got a budget of less than nothing."""
    assert EvictionConfig(policy="probe", budget=20).rule(16).store_blocks(0) == 1
    with pytest.raises(ValueError, match="budget 20 leaves no room beyond the window of 32"):
        EvictionConfig(policy="probe", budget=20, allow=("snapkv",))
    with pytest.raises(ValueError, match=r"last 8 tokens, which are always kept; .*probe_recent"):
        EvictionConfig(policy="probe", budget=8)
