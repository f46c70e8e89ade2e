"""``--kv-eviction-profile`` at start-up: whose shares, what is said, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.test_budget_log import report
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving import profile as module
from vllm_kvevict.serving.identity import identity
from vllm_kvevict.serving.profile import load

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def file(build: Any, tmp_path: Path) -> Path:
    """Shares of 0.2 and 1.8 for the two layers of the model that is built."""
    model = identity(build()).model_dump()
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(dict(model=model, policy="snapkv", budget="25%", layers=[0.2, 1.8])))
    return path


def test_whose_shares(build: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build()
    mine = identity(config)
    assert (mine.architecture, mine.layers, mine.kv_heads) == ("LlamaForCausalLM", 2, 1)
    assert identity(build(dtype="bfloat16", max_model_len=128)) == mine
    other = build(hf_overrides={"vocab_size": 1000})
    assert identity(other) != mine
    assert load(str(file), config).layers == (0.2, 1.8)
    with pytest.raises(ValueError, match=r"is that of LlamaForCausalLM \(2 layers.* and this"):
        load(str(file), other)
    with pytest.raises(ValueError, match="is that of"):
        load(Profile.model_validate_json(file.read_text()), other)

    monkeypatch.setattr(module, "SHIPPED", file.parent)
    assert load("auto", config).model == mine
    with pytest.raises(ValueError, match=r"no profile ships for Llama.*vllm-kvevict calibr"):
        load("auto", other)


def test_every_process_gets_the_shares_themselves(build: Any, file: Path) -> None:
    config = build({"policy": "ada-snapkv", "profile": str(file)}, block_size=32)
    file.unlink()
    travelled = EvictionConfig.parse(
        json.loads(json.dumps(config.additional_config))["kv_eviction"]
    )
    assert [rule.share.value for rule in travelled.layer_rules(32, 2)] == [0.2, 1.8]
    assert travelled.layer_rules(32, 2)[0].share != travelled.layer_rules(32, 2)[1].share


def test_says_what_the_groups_keep(build: Any, file: Path) -> None:
    eviction = {"policy": "ada-snapkv", "profile": str(file), "budget": 160}
    said = report(build(eviction, block_size=32))
    assert "store blocks: by layer" in said[0]
    assert "groups of 1, 1, with shares of 1.80, 0.20 as snapkv measured them" in said[1]
    assert "stores of 7, 1 blocks" in said[1]
    assert "budget of 160 tokens, 1 of 2 groups keep a block of 32 tokens" in said[2]
    said = report(build(eviction | {"budget": "25%"}, block_size=32))
    # A share of 0.2 is a block where the mean is 160 tokens beside the window of 32.
    assert "in prompts of less than 768 tokens" in said[2]
    said = report(build(eviction | {"budget": 224}, block_size=32))
    assert len(said) == 2 and "stores of 11, 1 blocks" in said[1]


@pytest.mark.parametrize(
    "eviction, says",
    [
        (dict(policy="streaming-llm"), "needs a policy with scores that compare across layers"),
        (dict(policy="ada-pyramid"), "--kv-eviction-profile and ada-pyramid both set individual"),
        (dict(policy="snapkv", allow="pyramidkv"), "--kv-eviction-profile and pyramidkv both"),
        (
            dict(policy="snapkv", profile=3),
            "--kv-eviction-profile: give auto, calibrate, none, or a file of vllm-kvevict",
        ),
        (
            dict(policy="snapkv", profile=""),
            "--kv-eviction-profile: give auto, calibrate, none, or a file of vllm-kvevict",
        ),
        (dict(policy="snapkv", profile={}), "--kv-eviction-profile: model: Field required"),
    ],
)
def test_refusals(build: Any, file: Path, eviction: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        build({"profile": str(file)} | eviction)
    assert says in str(caught.value)


def test_a_stage_of_one_layer_is_refused(build: Any, file: Path) -> None:
    from vllm_kvevict.serving.support import check

    config = build()
    check(config, EvictionConfig(policy="snapkv", profile=str(file)))
    object.__setattr__(config.parallel_config, "pipeline_parallel_size", 2)
    with pytest.raises(ValueError, match=r"budgets by layer .* one of its pipeline stages, has"):
        check(config, EvictionConfig(policy="snapkv", profile=str(file)))
