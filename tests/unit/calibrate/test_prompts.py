"""Built-in texts and an operator's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvevict.calibrate.prompts import PromptsError, builtin, from_file, token_ids


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def fits(text: str) -> bool:
    return len(text) <= 5000


def test_texts_of_the_length_that_was_asked() -> None:
    samples = builtin(7, fits)
    assert samples == builtin(7, fits) and len({sample.context for sample in samples}) == 7
    for index, sample in enumerate(samples):
        assert 4800 < len(sample.context) < 5400, "a hundred more with the facts"
        facts = re.findall(r"access code of the (\w+) is (\d{7})\.", sample.context)
        assert len(facts) == (0 if index % 3 == 2 else 4)
        asked = re.findall(r"of the (\w+)", sample.question) if facts else []
        assert set(asked) <= {place for place, _ in facts}


def test_each_text_with_and_without_its_question(tokenizer: Any) -> None:
    for sample in builtin(3, lambda text: len(text) < 900):
        whole, context = token_ids(tokenizer, sample)
        assert whole[: len(context)] == context and len(context) < len(whole)
        assert sample.question in tokenizer.decode(whole)
        assert sample.question not in tokenizer.decode(context)


def test_prompts_from_a_file(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a word"}]
    path.write_text(json.dumps("a text") + "\n\n" + json.dumps(messages) + "\n")
    text, chat = from_file(path, tokenizer)
    assert text == tokenizer("a text")["input_ids"]
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert chat == rendered


@pytest.mark.parametrize("content", ["", "3", "{", '{"a": 1}', '[{"no": 1}]'])
def test_what_is_no_prompt(tokenizer: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(PromptsError, match="--prompts: ") as caught:
        from_file(path, tokenizer)
    assert "\n" not in str(caught.value)
    with pytest.raises(PromptsError, match="No such file"):
        from_file(tmp_path / "none", tokenizer)
