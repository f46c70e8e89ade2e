"""A wrong answer of stock vLLM to one of the demo's first questions hides what evictions lose."""

import pytest

from benchmarks.demo import BLOCK, CHARACTERS, PROMPT, SIZES, is_right
from benchmarks.facts import questions
from benchmarks.smollm2 import ModelUnavailable, real_model


@pytest.mark.nightly
def test_stock_answers_what_slow_machines_ask() -> None:
    """In float32, in which they compute."""
    from vllm import LLM, SamplingParams

    try:
        model = real_model()
    except ModelUnavailable as error:
        pytest.skip(str(error))
    llm = LLM(
        str(model), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=2304,
        max_num_batched_tokens=PROMPT, kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    for question in questions(SIZES[-2][0], CHARACTERS):
        chat = [{"role": "user", "content": text} for text in question.messages()]
        (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
        assert is_right(question, output.outputs[0].text), output.outputs[0].text
