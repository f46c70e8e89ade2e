"""A word-level tokenizer for the tasks' closed vocabulary, with a chat template."""

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.words import ADJECTIVES, NOUNS, NUMBERS, PLACES, VARIABLES, VERBS

PAD, UNKNOWN, USER, ASSISTANT, END = "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"
GLUE = """. , the a and is are in of for every one hill what which magic number numbers line
content store copy variables hold five three most common frequent words""".split()
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|> {{ message['content'] }} <|end|>"
    "{% else %}<|user|> {{ message['content'] }} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer: one token a word, a number or a stop.

    Case, line breaks, colons, arrows and question marks are dropped, so that what follows a name
    in the text (``silent harbor: 482 913``) and in the prompt (``silent harbor?``) stands next
    to it.
    """
    special = [PAD, UNKNOWN, USER, ASSISTANT, END]
    words = dict.fromkeys([*special, *GLUE, *ADJECTIVES, *NOUNS, *VERBS, *PLACES, *VARIABLES])
    vocabulary = {word: index for index, word in enumerate([*words, *NUMBERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[:?]|->"), "removed"), pre_tokenizers.Whitespace()]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast
