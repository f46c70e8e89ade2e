"""Answers over simulated caches, against transformers; their arithmetic: tests/interpreted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality.prompt import Prompt
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.vllm_caches import ATTENTION, CACHES, CacheType, answer
from tests.e2e.architectures import architecture
from tests.models import random_prompt

TOKENS = 24
SAMPLE = RulerSample("none", "", "", "", ("",), max_tokens=TOKENS)
PROMPT = Prompt(SAMPLE, tuple(random_prompt(150, seed=3)), context=120)


def load(folder: Path, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


@pytest.fixture(scope="module", params=["Llama", "windows"])
def folder(request: Any, tiny_model: Path, tmp_path_factory: Any) -> Path:
    if request.param == "Llama":
        return tiny_model
    return architecture("Gemma3Text", tmp_path_factory.mktemp("windows"))


@torch.inference_mode()
def test_answers_depend_on_what_is_quantised_and_on_nothing_else(folder: Path) -> None:
    stock, model = load(folder, "sdpa"), load(folder, ATTENTION)
    ids = torch.tensor([PROMPT.ids])
    found = stock.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    wanted = found[0, ids.shape[1] :].tolist()
    exact = CacheType(lambda x: x, lambda x: x, 0, reads_own_step=True)
    for cache_type in (None, exact, replace(exact, reads_own_step=False)):
        assert answer(model, PROMPT, cache_type, set()) == wanted
    for name in CACHES:
        rough = replace(CACHES[name], full_layers=0)
        assert answer(model, PROMPT, rough, set()) != wanted, "nothing was quantised"
