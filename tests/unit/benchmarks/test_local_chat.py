"""Prompts of models with a chat template, and of base models without one."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.prompt import make_prompt
from benchmarks.quality.ruler.sample import RulerSample

WORDS = {"<bos>": 0, "<unk>": 1, "Read": 2, "this": 3, "What": 4, "now": 5, "user": 6, "It": 7}
SAMPLE = RulerSample("later", "Read this", "What now", "It", ("this",), max_tokens=4)


@pytest.fixture
def chat(tmp_path, request):
    """A model's folder with a tokenizer that begins texts with <bos>, and maybe a template."""
    words = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", unk_token="<unk>", chat_template=request.param
    )
    tokenizer.save_pretrained(tmp_path)
    return LocalChat(tmp_path)


@pytest.mark.parametrize("chat", [None], indirect=True)
def test_a_base_model_gets_the_text_after_its_first_token(chat):
    prompt = make_prompt(SAMPLE, chat.tokenize, chat.encode)
    assert prompt.ids == (0, 2, 3, 4, 5, 7)
    assert prompt.context == 3


TEMPLATE = "<bos>user {{ messages[0]['content'] }}"


@pytest.mark.parametrize("chat", [TEMPLATE], indirect=True)
def test_a_template_supplies_the_first_token_itself(chat):
    prompt = make_prompt(SAMPLE, chat.tokenize, chat.encode)
    assert prompt.ids == (0, 6, 2, 3, 4, 5, 7)
    assert prompt.context == 4
