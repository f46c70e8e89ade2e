"""``python -m vllm_kvevict.calibrate`` on a tiny model, and a server of its file."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.models import random_prompt, random_text
from tests.oracles.engine import engine
from vllm_kvevict.calibrate.__main__ import main
from vllm_kvevict.calibrate.costs import Costs
from vllm_kvevict.calibrate.rank import kept
from vllm_kvevict.front.shares import read
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.settings.config import EvictionConfig


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def test_the_shares_are_those_of_the_scores(tiny_model_kv4, tmp_path: Path, capsys) -> None:
    """Of one prompt, beside the scores of the very same eviction; then a server keeps by them."""
    text, path = random_text(400, seed=3), tmp_path / "shares.json"
    (tmp_path / "prompts.jsonl").write_text(json.dumps(text))
    options = ["--output", str(path), "--prompts", str(tmp_path / "prompts.jsonl")]
    flags = ["--kv-eviction", "ada-snapkv", "--dtype", "float32", "--block-size", "32"]
    assert main([str(tiny_model_kv4), *options, *flags]) == 0
    assert str(path) in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["policy"], found["budget"]) == ("ada-snapkv", "25%")

    records = []
    eviction = dict(policy="ada-snapkv", budget="25%")
    with engine(tiny_model_kv4, eviction, max_model_len=1024) as run:
        ids = run.llm.get_tokenizer()(text)["input_ids"]
        run.worker.kv_eviction.listeners.append(records.append)
        run.generate([ids], 2)
    (record,) = records
    counts = kept(record.scores, int(len(ids) * 0.25) - 32).double()
    expected = counts.mean(1) / counts.mean()
    assert found["layers"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found["heads"][1] == pytest.approx((counts[1] / counts[1].mean()).tolist(), abs=1e-4)

    served = dict(policy="ada-snapkv", budget=288, layers=str(path), groups=2)
    with engine(tiny_model_kv4, served, max_model_len=2048) as run:
        run.generate([random_prompt(1200, seed=1)], 3)
        assert run.counters.evictions == 1
        sizes = [sum(map(len, layer)) for layer in run.lives()[0][-1].evictions[0].positions]
    assert sum(sizes) == 4 * 4 * 256, "what four layers of four heads keep at 8 blocks"
    order = sorted(range(4), key=lambda layer: found["layers"][layer])
    assert [sizes[layer] for layer in order] == sorted(sizes)


def test_shares_by_answers_lean_to_where_answers_are_lost(tiny_model_kv4, tmp_path: Path) -> None:
    """Half of a share is that by scores; the other half follows the costs that are measured."""
    text, path = random_text(300, seed=4), tmp_path / "answers.json"
    (tmp_path / "prompts.jsonl").write_text(json.dumps(text))
    options = ["--by", "answers", "--output", str(path)]
    options += ["--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([str(tiny_model_kv4), *options, "--kv-eviction", "ada-snapkv"]) == 0
    shares = read(path)
    assert shares.made["by"] == "answers" and shares.heads is not None
    found = torch.tensor(shares.heads) * torch.tensor(shares.layers)[:, None]

    ids = AutoTokenizer.from_pretrained(tiny_model_kv4)(text)["input_ids"]
    policy = build_policy(EvictionConfig(policy="ada-snapkv", budget="25%"))
    measured = Costs(str(tiny_model_kv4), policy.scorer, 32)
    costs = measured.of(ids, len(ids))
    counts = kept(measured.scores(len(ids)), int(len(ids) * 0.25) - 32).double()
    more = 2 * found - counts / counts.mean()
    worth = (costs[..., 0] - costs.flatten(1).amin(1)[:, None]).flatten().argsort()
    assert more.flatten()[worth[-4:]].mean() > 2 * more.flatten()[worth[:4]].mean()


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--kv-eviction", "streaming-llm"], "a policy whose scores compare across layers"),
        (["--kv-eviction", "snapkv", "--kv-eviction-layers", "auto"], "without --kv-eviction-l"),
        (["--kv-eviction", "snapkv", "--samples", "0"], "--samples must be at least 1"),
        (["--kv-eviction", "snapkv", "-tp", "2"], "calibrate runs on one rank"),
        (["--kv-eviction", "snapkv", "--output", "/no/folder/a.json"], "there is no folder"),
        (["--kv-eviction", "snapkv", "--prompts", "/no/file"], "No such file"),
        (["--kv-eviction", "h2o", "--by", "answers", "--length", "300"], "not for h2o"),
        (["--kv-eviction", "snapkv", "--by", "answers", "--length", "128"], "give longer prompts"),
    ],
)
def test_refusals_are_one_sentence(tiny_model, capsys, flags, says) -> None:
    assert main([str(tiny_model), *flags]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and says in message
