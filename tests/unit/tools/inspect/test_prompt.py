"""Prompts as tokens: eviction points and where text stands."""

from typing import Any

import pytest

from tests.models import random_text
from vllm_kvevict.calibrate.read_prompt import Prompt, read_prompt

TEXT = random_text(60, seed=1) + " The magic number is 4711. " + random_text(40, seed=2)
QUESTION = "Which number is magic?"


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_ids_are_those_of_the_tokenizer(tokenizer, chat) -> None:
    prompt = read_prompt(tokenizer, TEXT, None, None, chat)
    expected = tokenizer(TEXT)["input_ids"]
    if chat:
        messages = [{"role": "user", "content": TEXT}]
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    assert prompt.ids == expected
    assert prompt.evict_at is None


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_found_tokens_decode_to_the_text(tokenizer, chat) -> None:
    prompt = read_prompt(tokenizer, TEXT, None, None, chat)
    for text in ("magic number is 4711", "agic numb", "4711", TEXT[:9]):
        (place,) = prompt.find(text)
        assert text in tokenizer.decode(prompt.ids[place.start : place.stop])
        assert text not in tokenizer.decode(prompt.ids[place.start + 1 : place.stop])
        assert text not in tokenizer.decode(prompt.ids[place.start : place.stop - 1])


def test_every_occurrence_is_found(tokenizer) -> None:
    prompt = read_prompt(tokenizer, "red 12 blue 12 red 12", None, None, False)
    places = prompt.find("12")
    assert len(places) == 3
    assert [place.start for place in places] == sorted({place.start for place in places})
    assert all("12" in tokenizer.decode(prompt.ids[p.start : p.stop]) for p in places)


@pytest.mark.parametrize("text", ["absent", ""])
def test_text_that_is_not_there(tokenizer, text) -> None:
    prompt = read_prompt(tokenizer, TEXT, None, None, False)
    with pytest.raises(ValueError, match=f"--find '{text}': the prompt does not contain"):
        prompt.find(text)


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_the_eviction_point_lies_between_context_and_question(tokenizer, chat) -> None:
    prompt = read_prompt(tokenizer, TEXT + "\n", QUESTION, None, chat)
    assert prompt.evict_at is not None
    context = tokenizer.decode(prompt.ids[: prompt.evict_at])
    rest = tokenizer.decode(prompt.ids[prompt.evict_at :])
    assert context.rstrip().endswith(TEXT)
    assert rest.lstrip().startswith(QUESTION)


def test_a_question_that_the_context_repeats(tokenizer) -> None:
    prompt = read_prompt(tokenizer, f"{QUESTION} {TEXT}", QUESTION, None, False)
    assert prompt.evict_at is not None
    assert tokenizer.decode(prompt.ids[prompt.evict_at :]).strip() == QUESTION


def test_eviction_point_in_tokens(tokenizer) -> None:
    whole = read_prompt(tokenizer, TEXT, None, None, False)
    n = len(whole.ids)
    assert read_prompt(tokenizer, TEXT, None, n, False).evict_at == n
    for wrong in (0, -3, n + 1):
        with pytest.raises(ValueError, match=f"--at: must be between 1 and .* {n} tokens"):
            read_prompt(tokenizer, TEXT, None, wrong, False)


def test_empty_prompts(tokenizer) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        read_prompt(tokenizer, "", None, None, False)
    with pytest.raises(ValueError, match="no text to put in front"):
        read_prompt(tokenizer, " \n", QUESTION, None, False)


def test_what_a_tokenizer_without_a_template_or_offsets_cannot_do(tokenizer) -> None:
    class Slow:
        is_fast = False
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(sign) for sign in text]

    prompt = read_prompt(Slow(), "abc", None, 2, False)
    assert prompt == Prompt([97, 98, 99], "abc", None, 2)
    with pytest.raises(ValueError, match="--chat: this model's tokenizer has no chat template"):
        read_prompt(Slow(), "abc", None, None, True)
    for use in (lambda: prompt.find("b"), lambda: read_prompt(Slow(), "abc", "d", None, False)):
        with pytest.raises(ValueError, match="a tokenizer that knows the characters"):
            use()
