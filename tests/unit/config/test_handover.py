"""Which requests one server computes for another, and where they evict."""

from typing import Any

import pytest

from tests.unit.config.test_requests import parse, rules, server
from vllm_kvevict.config.requests import parse_options

TAKEN = [{"do_remote_decode": True}, {"do_remote_prefill": True, "do_remote_decode": False}]


@pytest.mark.parametrize("params", TAKEN)
def test_a_prompt_that_another_server_answers_evicts_before_its_last_token(params):
    def point(prompt_len: int = 1000, path: str | None = "/stores", **given: Any) -> int | None:
        config = server(store_path=path, when=given.pop("when", "always"))
        extra_args = {"kv_transfer_params": params} | given
        return parse_options(config, extra_args, prompt_len, rules(config)).at

    assert (point(), point(2), point(1)) == (999, 1, None)
    assert point(kv_eviction_at=400) == 400 and point(kv_eviction_at=-1000 + 1) == 1
    assert point(path=None) is None, "there is nowhere to hand it over"
    assert point(when="pressure") is None
    assert point(kv_eviction_prefill_interval=256) is None


@pytest.mark.parametrize(
    "params",
    [None, {}, [], "do_remote_decode", {"do_remote_decode": 1}, {"do_remote_prefill": None}],
)
def test_other_parameters_of_a_connector_change_nothing(params):
    config = server(store_path="/stores")
    extra_args = {"kv_transfer_params": params}
    assert parse_options(config, extra_args, 1000, rules(config)) == parse(config=config)
