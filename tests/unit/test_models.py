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


def test_tokenizer_round_trip_and_chat_template(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "kanvas, ner: Grüße 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<s><|user|>hi<|assistant|>"
    assert ids[0] == tokenizer.bos_token_id


def test_random_prompt_is_reproducible_and_has_no_special_tokens() -> None:
    assert random_prompt(50, 3) == random_prompt(50, 3) != random_prompt(50, 4)
    assert len(random_prompt(3000, 0)) == 3000
    assert 7 <= min(random_prompt(3000, 0)) <= max(random_prompt(3000, 0)) < 1024
