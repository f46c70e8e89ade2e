"""Training: a resumed run ends where an unbroken one does, and writes what vLLM loads."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.quality.data import MIX
from benchmarks.quality.suite import TRAINED
from benchmarks.quality.train import Stage, rate_at, spelled, train
from benchmarks.quality.train import weights as read_weights

pytestmark = pytest.mark.slow


def options(output: Path, stages: list[str], resume: bool) -> Namespace:
    return Namespace(
        output=output, stages=list(map(Stage.parse, stages)), rate=2e-3, warmup=2, decay=0.2,
        seed=0, every=2, samples=1, threads=1, resume=resume, head_size=32, mix=MIX,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Four steps in one go, and the same four broken off after two."""
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    stages = ["64x2:2", "96x1:8@0.001"]
    train(options(whole, stages, False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.quality.train.save", stop_at_step_4(broken))
        with pytest.raises(KeyboardInterrupt):
            train(options(broken, stages, False))
    train(options(broken, stages, True))
    return whole, broken


def stop_at_step_4(folder: Path) -> Callable[..., None]:
    def save(*_: object) -> None:
        if len((folder / "log.jsonl").read_text().splitlines()) == 2:
            raise KeyboardInterrupt

    return save


def test_a_resumed_run_ends_where_an_unbroken_one_does(runs):
    whole, broken = (torch.load(run / "checkpoint.pt", weights_only=False) for run in runs)
    assert whole["step"] == broken["step"] == 10
    for name, weights in whole["model"].items():
        assert torch.equal(weights, broken["model"][name]), name
    logs = [
        [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in runs
    ]
    assert [entry["step"] for entry in logs[1]] == [2, 4, 6, 8, 10]
    assert [entry["loss"] for entry in logs[0]] == [entry["loss"] for entry in logs[1]]


def test_the_model_loads_as_vllm_does(runs):
    model = LlamaForCausalLM.from_pretrained(runs[0])
    assert model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(runs[0])) == model.config.vocab_size
    card = (runs[0] / "README.md").read_text()
    assert "python -m benchmarks.quality.train" in card and "64x2:2 96x1:8@0.001" in card


def test_the_shipped_model_is_what_the_readme_says():
    config = LlamaForCausalLM.from_pretrained(TRAINED).config
    assert config.num_key_value_heads >= 4 and config.num_hidden_layers >= 4
    assert config.head_dim in (32, 64) and config.max_position_embeddings >= 2048
    weights = TRAINED / "model.safetensors"
    assert 4e6 <= weights.stat().st_size <= 8e6, "2 to 4 million parameters in bfloat16"
    assert "Accuracy" in (TRAINED / "README.md").read_text()


def test_stages_read_and_write_the_same_text():
    assert str(Stage.parse("64x32:900")) == "64x32:900"
    assert Stage.parse("64x32:900") == Stage(64, 32, 900)
    assert Stage.parse("256x16:600@2e-3") == Stage(256, 16, 600, 2e-3)
    assert str(Stage(256, 16, 600, 2e-3)) == "256x16:600@0.002"
    with pytest.raises(ValueError):
        Stage.parse("64")


def test_mixes_read_and_write_the_same_text():
    assert read_weights(spelled(MIX)) == MIX
    assert read_weights("lines=2.5") == {"lines": 2.5}
    with pytest.raises(ValueError, match="kinds are"):
        read_weights("poems=1")


def test_the_rate_warms_up_stays_and_decays():
    rates = [rate_at(step, 100, 10, 0.2) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:80] == [1.0] * 71
    assert rates[90] == pytest.approx(0.5) and 0 < rates[99] < 0.06
