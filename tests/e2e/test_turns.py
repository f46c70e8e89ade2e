"""Several questions in turn, and long free answers, through real servers of random weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality import free, turns
from benchmarks.quality.local_chat import LocalChat

SHARED = [
    "--layers", "none", "--policies", "snapkv", "--budgets", "25%", "--samples", "2",
    "--dtype", "float32", "--kv-memory", "128M", "--concurrency", "2",
]  # fmt: skip


def run(command, model: Path, folder: Path, *more: str) -> dict:
    paths = ["--work", str(folder), "--output", str(folder / "result.json")]
    command.main([*SHARED, "--model", str(model), *paths, *more])
    return json.loads((folder / "result.json").read_text())


def test_each_context_is_evicted_once_and_later_turns_take_its_store(tiny_model_kv4, tmp_path):
    result = run(turns, tiny_model_kv4, tmp_path, "--turns", "3", "--length", "700")
    counted = result["evictions"]["counted"]
    assert (counted["evictions"], counted["stores_published"]) == (2, 2)
    assert counted["stores_reused"] == 4 and counted["tokens_reused"] >= 4 * 600
    assert result["notes"] == []
    assert [len(cell["turns"]) for cell in result["cells"]] == [3, 3]
    answers = json.loads((tmp_path / "answers-turns.json").read_text())
    assert len(answers) == 2 * 2 * 3
    lengths = [row["prompt_tokens"] for row in answers if row["context"] == 0]
    assert lengths[:3] == sorted(set(lengths[:3]))
    full, evicted = (
        [row["answer"] for row in answers if row["label"] == label]
        for label in ("full cache", "snapkv")
    )
    assert full != evicted


def test_free_answers_are_scored_as_transformers_scores_them(tiny_model_kv4, tmp_path):
    tokens = ["--tokens", "224", "--facts", "3", "--length", "400"]
    result = run(free, tiny_model_kv4, tmp_path, *tokens)
    counted = result["evictions"]["counted"]
    assert counted["evictions_prefill"] == 4 and counted["evictions_decode"] == 2
    model = AutoModelForCausalLM.from_pretrained(tiny_model_kv4, dtype=torch.float32)
    options = free.FreeOptions(length=400, facts=3, samples=2)
    asked = free.prompts(options, LocalChat(tiny_model_kv4))
    journal = (tmp_path / "answers-free.jsonl").read_text().splitlines()
    answers = [tuple(json.loads(line)["ids"]) for line in journal]
    texts = json.loads((tmp_path / "answers-free.json").read_text())
    by_text = {json.loads(line)["text"]: json.loads(line)["ids"] for line in journal}
    assert len(answers) == 6 and {len(ids) for ids in answers} == {224}
    losses: dict[str, list[float]] = {}
    for row in texts:
        prompt, ids = asked[row["context"]].ids, by_text[row["answer"]]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].double()
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        loss = -found[torch.arange(len(ids)), torch.tensor(ids)].mean()
        losses.setdefault(row["label"], []).append(float(loss))
    for cell in result["cells"]:
        own = losses[cell["label"]]
        assert cell["nll"]["mean"] == pytest.approx(sum(own) / 2, abs=1e-4)
    assert result["cells"][0]["excess"]["mean"] == 0
    assert result["cells"][1]["excess"]["mean"] != 0
