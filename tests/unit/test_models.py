"""The random-weight model must be worth testing on: its output depends on the whole context."""

from pathlib import Path

import pytest

from tests.models import random_prompt


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_model_kv4"])
def test_greedy_decoding_varies_and_depends_on_old_tokens(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path: Path = request.getfixturevalue(fixture)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = []
    for prompt in (random_prompt(200, 0), random_prompt(200, 1)):
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None)
        answers.append(out[0, len(prompt) :].tolist())
    assert all(len(set(answer)) > 24 for answer in answers)
    assert answers[0] != answers[1]

    late = random_prompt(200, 0)
    late[:100] = random_prompt(100, 2)
    out = model.generate(
        torch.tensor([late]), max_new_tokens=48, do_sample=False, eos_token_id=None
    )
    same = sum(a == b for a, b in zip(answers[0], out[0, 200:].tolist(), strict=True))
    assert same < 12
