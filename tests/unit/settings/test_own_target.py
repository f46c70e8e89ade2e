"""Targets as operators and requests write them, and who may have one."""

import pytest

from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.own_target import check_target
from vllm_kvevict.settings.requests import parse_options
from vllm_kvevict.settings.target import parse_target

SERVER = dict(policy="snapkv", budget=256, allow="h2o,subgen-stream,none", target=0.03)


@pytest.mark.parametrize(
    "value, nats", [(0, 0), ("0.03", 0.03), (" 1e-2 ", 0.01), (3, 3), (0.5, 0.5)]
)
def test_targets(value, nats):
    assert parse_target(value) == nats
    config = EvictionConfig(policy="snapkv", target=value)
    assert config.target == nats and config.replays and not config.audits


@pytest.mark.parametrize("value", ["", "some", -0.1, "nan", "inf", True, [0.1], 10**400])
def test_no_targets(value):
    with pytest.raises(ValueError, match=r"give nats such as 0\.03, at least 0, not "):
        parse_target(value)


def test_the_flag_is_named():
    with pytest.raises(ValueError, match=r"--kv-eviction-target: give nats .*, not 'little'"):
        EvictionConfig.parse(dict(policy="snapkv", target="little"))
    assert EvictionConfig(policy="snapkv").target is None


def options(asked, length=1000, **server):
    config = EvictionConfig(**SERVER | server)
    return parse_options(config, asked, length, [config.timeline(16)])


@pytest.mark.parametrize(
    "asked, target",
    [
        ({}, 0.03),
        ({"kv_eviction_target": "0.2"}, 0.2),
        ({"kv_eviction_target": 0}, 0),
        ({"kv_eviction_at": 500}, 0.03),
        ({"kv_eviction_interval": 0, "kv_eviction_target": 1}, 1),
        # The server's is for those that can have one.
        ({"kv_eviction_budget": 100}, None),
        ({"kv_eviction": "none"}, None),
        ({"kv_eviction": "h2o"}, None),
        ({"kv_eviction": "subgen-stream"}, None),
        ({"kv_eviction_when": "pressure"}, None),
        ({"kv_eviction_prefill_interval": 128}, None),
        ({"kv_transfer_params": {"do_remote_decode": True}}, None),
    ],
)
def test_who_has_one(asked, target):
    assert options(asked).target == target


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"kv_eviction_target": "little"}, "kv_eviction_target: give nats such as 0.03"),
        ({"kv_eviction_budget": 100}, "chooses the budget; leave kv_eviction_budget or it away"),
        ({"kv_eviction": "none"}, "needs a policy, not none"),
        ({"kv_eviction": "h2o"}, "needs another policy than h2o, whose evictions cannot be tried"),
        ({"kv_eviction": "subgen-stream"}, "needs another policy than subgen-stream"),
        ({"kv_eviction_when": "pressure"}, "needs kv_eviction_when always"),
        ({"kv_eviction_prefill_interval": 128}, "needs kv_eviction_prefill_interval 0"),
        (
            {"kv_transfer_params": {"do_remote_decode": True}},
            "needs a prompt that this server both computes and answers",
        ),
    ],
)
def test_who_cannot_have_one_of_its_own(asked, message):
    with pytest.raises(ValueError, match=r"^KV eviction: kv_eviction_target") as caught:
        options({"kv_eviction_target": 0.1} | asked)
    assert message in str(caught.value)


def test_a_server_without_targets_has_none_for_requests():
    assert options({}, target=None).target is None
    with pytest.raises(ValueError, match="needs a server with --kv-eviction-target"):
        options({"kv_eviction_target": 0.1}, target=None)


def test_a_server_that_caps_budgets_bounds_targets():
    capped = dict(max_budget="25%", budget="25%", allow="h2o")
    assert options({"kv_eviction_target": 0.03}, **capped).target == 0.03
    assert options({"kv_eviction_target": 0.001}, **capped).target == 0.001
    with pytest.raises(ValueError, match=r"must be at most 0\.03 on this server, which caps budg"):
        options({"kv_eviction_target": 0.031}, **capped)


@pytest.mark.parametrize(
    "server, message",
    [
        (dict(policy="h2o"), "those of h2o cannot be tried"),
        (dict(policy="ada-h2o"), "those of ada-h2o cannot be tried"),
        (dict(when="pressure"), "remove --kv-eviction-when pressure or it"),
        (dict(prefill_interval=256), "remove --kv-eviction-prefill-interval or it"),
    ],
)
def test_servers_whose_requests_could_have_none(server, message):
    check_target(EvictionConfig(**SERVER | server | dict(target=None)))
    with pytest.raises(ValueError, match=f"^KV eviction: --kv-eviction-target .*{message}"):
        check_target(EvictionConfig(**SERVER | server))
