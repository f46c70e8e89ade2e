"""Where the context ends, against the tokenizer's own character offsets."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.quality.prompt import (
    AGNOSTIC,
    AWARE,
    common_prefix,
    make_prompt,
    message,
    text_tokens,
)
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tasks import make


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_common_prefix(first, second):
    expected = max(
        n for n in range(13) if first[:n] == second[:n] and n <= min(len(first), len(second))
    )
    assert common_prefix(list(map(ord, first)), list(map(ord, second))) == expected


@pytest.fixture(scope="module")
def byte_level(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def renderer(tokenizer):
    def render(messages) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    return render, lambda messages: tokenizer(render(messages), add_special_tokens=False)


def test_the_answer_begins_with_the_prefix(byte_level):
    _, encode = renderer(byte_level)
    sample = make("qa", 800, 3)
    prompt = make_prompt(
        sample,
        lambda messages: encode(messages)["input_ids"],
        lambda text: byte_level(text, add_special_tokens=False)["input_ids"],
    )
    text = byte_level.decode(prompt.ids)
    assert text.endswith(sample.prefix) and text.count(sample.question) == 1
    assert byte_level.decode(prompt.ids[: prompt.context]).endswith("any other words.\n\n")


@pytest.mark.parametrize(
    "task", ["s-niah", "mk-niah", "mv-niah", "mq-niah", "vt", "cwe", "fwe", "qa"]
)
def test_context_ends_where_the_question_begins(task, byte_level):
    render, encode = renderer(byte_level)
    for seed in range(5):
        sample = make(task, 600, seed)
        prompt = make_prompt(
            sample, lambda messages: encode(messages)["input_ids"], lambda text: [-1]
        )
        text = render(message(sample))
        question = text.rindex(sample.question)
        encoded = encode(message(sample))
        offsets = encoded.encodings[0].offsets
        before = sum(end <= question for _, end in offsets)
        assert prompt.ids == (*encoded["input_ids"], -1)
        # The empty question can make the last break merge with what follows it.
        assert before - 1 <= prompt.context <= before
        assert prompt.point(AWARE) == len(prompt.ids)
        assert prompt.point(AGNOSTIC) == prompt.context
        context = text[: offsets[prompt.context - 1][1]].rstrip()
        assert context.endswith(sample.context.rstrip()[-12:])


def test_the_context_is_the_same_for_any_question(byte_level):
    _, encode = renderer(byte_level)
    first = make("mk-niah", 600, 1)
    seen = set()
    for seed in range(2, 8):
        other = make("vt" if seed % 2 else "s-niah", 600, seed)
        sample = replace(first, question=other.question)
        prompt = make_prompt(
            sample, lambda messages: encode(messages)["input_ids"], lambda text: []
        )
        seen.add(prompt.ids[: prompt.context])
    assert len(seen) == 1


def test_a_template_that_puts_the_question_first_is_refused():
    def question_first(messages):
        context, _, question = messages[0]["content"].partition("\n")
        return list((question + context).encode())

    with pytest.raises(ValueError, match="puts the context first"):
        sample = RulerSample("vt", "the context", "what?", "It is", ("x",), 8)
        make_prompt(sample, question_first, lambda text: [])


def test_text_tokens_leave_room_for_template_and_question():
    """A token a word, and a template of 100 tokens."""

    def tokenize(messages):
        return [0] * 100 + messages[0]["content"].split()

    words = len("Read the following text. I will ask you about it afterwards.".split())
    assert text_tokens(1000, "What is it?", tokenize) == 1000 - 100 - words - 3
