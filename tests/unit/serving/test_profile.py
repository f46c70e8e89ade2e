"""Files of shares: what is read, whose they are, and every refusal in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving import profile as module
from vllm_kvevict.serving.profile import read

MODEL = dict(architecture="LlamaForCausalLM", layers=2, kv_heads=2, config="0123456789abcdef")


def content(**changes: Any) -> dict[str, Any]:
    heads = [[0.5, 1.5], [1.0, 1.0]]
    whole = dict(model=MODEL, policy="ada-snapkv", budget="25%", layers=[0.4, 1.6], heads=heads)
    return whole | changes


def written(folder: Path, value: Any) -> Path:
    path = folder / "shares.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_file_survives_the_way_to_every_process(tmp_path: Path) -> None:
    found = read(written(tmp_path, content(made={"prompts": 8})))
    assert found.layers == (0.4, 1.6) and found.heads == ((0.5, 1.5), (1.0, 1.0))
    config = EvictionConfig(policy="snapkv", profile=found)
    again = EvictionConfig.parse(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config
    rules = again.layer_rules(32, 2)
    assert [rule.share.value for rule in rules] == [0.4, 1.6]
    assert read(written(tmp_path, content(heads=None))).heads is None


@pytest.mark.parametrize(
    "value, says",
    [
        ("{", "Expecting property name"),
        ("[1]", "valid dictionary"),
        (content(more=1), "more: Extra inputs"),
        (content(layers=[0.5, 1.0, 1.5]), "3 shares by layer do not match the 2 layers"),
        (content(layers=[0.5, 1.6]), "shares by layer must be above 0 and average 1, not 1.05"),
        (content(layers=[0.0, 2.0]), "above 0 and average 1"),
        (content(layers=[float("nan"), 1.0]), "above 0 and average 1"),
        (content(layers=["a", 1]), "layers.0: "),
        (content(heads=[[1.0, 1.0]]), "2 rows of 2 numbers"),
        (content(heads=[[1.0], [1.0, 1.0]]), "2 rows of 2 numbers"),
        (content(heads=[[1.0, 1.0], [0.5, 1.0]]), "shares by KV head of layer 1 must"),
        (content(model=MODEL | {"layers": 1}), "model.layers: "),
    ],
)
def test_what_is_no_file_of_shares(tmp_path: Path, value: Any, says: str) -> None:
    path = written(tmp_path, value)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"KV eviction: --kv-eviction-profile: {path}: ")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="Is a directory"):
        read(tmp_path)


def test_every_shipped_file_is_sound() -> None:
    for path in module.SHIPPED.glob("*.json"):
        assert read(path).heads is not None
