"""``--kv-eviction none``: stock vLLM, but that our keys of requests are dropped."""

import json
import logging
from typing import Any

import pytest

from tests import forked
from tests.unit.serving.switched_off_script import ASKED
from vllm_kvevict.config.requests import KEYS
from vllm_kvevict.serving.switched_off import without_keys


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    settings = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128, hidden_size=64,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, dtype="float32",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    done = forked.run("tests.unit.serving.switched_off_script", folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_configuration_is_that_of_stock_vllm(found: dict[str, Any]) -> None:
    assert found["stock"][-1] == {} and all(made == found["stock"] for made in found["rolled"])
    assert found["rolled_other"] == found["stock_other"] != found["stock"]


def test_our_keys_are_dropped_from_every_request(found: dict[str, Any]) -> None:
    assert len(found["after"]) == 6
    for row in found["after"].values():
        assert row["ours"] is None
        assert row["both"] == {"session_id": "s"}


def test_what_is_not_ours_is_judged_as_before(found: dict[str, Any]) -> None:
    """A mapping is refused by vLLM, a number is passed on."""
    for name, row in found["before"].items():
        assert (row["ours"], row["both"]) == ("refused", "refused")
        assert (row["another's"], row["unknown"]) == ("refused", "refused")
        assert row["unknown number"] == ASKED["unknown number"]
        rest = ASKED.keys() - {"ours", "both"}
        assert {one: found["after"][name][one] for one in rest} == {one: row[one] for one in rest}


@pytest.mark.parametrize("xargs", [None, {}, "text", 3, ["kv_eviction"], {"a": 1}])
def test_what_has_none_of_our_keys_is_left_alone(xargs: Any) -> None:
    assert without_keys(xargs) is xargs


def test_keys_that_are_no_text() -> None:
    assert without_keys({1: 2, KEYS[0]: 3}) == {1: 2}


@pytest.mark.usefixtures("registered")
def test_one_line_says_so(build: Any, records: list[logging.LogRecord]) -> None:
    build("none")
    (line,) = [record.getMessage() for record in records]
    assert "KV eviction is off" in line and "ignores the kv_eviction keys" in line
    records.clear()
    build()
    assert not records


@pytest.mark.usefixtures("registered")
def test_a_rollback_does_not_fail_with_what_it_rolls_back(
    build: Any, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kvevict.serving import switched_off

    def broken(_: Any) -> None:
        raise AttributeError("vllm_xargs")

    monkeypatch.setattr(switched_off, "switch_off", broken)
    assert build("none").additional_config == {}
    assert [record.levelname for record in records] == ["WARNING"]
