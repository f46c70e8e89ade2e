"""Training batches: dialogues drawn from the training half, as token ids and loss weights."""

import random
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.quality import tasks
from benchmarks.quality.tasks import Dialogue, Writer
from benchmarks.quality.tokenizer import ASSISTANT, END, USER
from benchmarks.quality.words import ADJECTIVES, NOUNS, NUMBERS, VARIABLES

WORDS = ADJECTIVES + NOUNS + NUMBERS + VARIABLES

MIX = {
    "recite": 10, "needles": 6, "many": 16, "values": 4, "queries": 14, "lines": 26, "vt": 16,
    "cwe": 5, "fwe": 3,
}  # fmt: skip
"""Kinds of dialogues with their weights. Kinds that ask many questions teach fastest."""

FIRST_MIX = {"echo": 60, "recite": 20, "many": 8, "lines": 12}
"""Up to :data:`FIRST_LENGTH` tokens: repeating phrases out of order makes heads that look up."""

FIRST_LENGTH = 128

SLACK = 14
"""Tokens that the last sentence of filler may stand out by, and the context's first."""


def dialogue(rng: random.Random, tokens: int, mix: Mapping[str, float] = MIX) -> Dialogue:
    """One dialogue of about ``tokens`` tokens, of a random kind and density.

    ``mix`` weighs the kinds of those longer than :data:`FIRST_LENGTH`.
    """
    write = Writer(rng, evaluation=False)
    mix = mix if tokens > FIRST_LENGTH else FIRST_MIX
    (kind,) = rng.choices(list(mix), list(mix.values()))
    turns = max(2, tokens // 36)
    words = tokens - turns * 15 - 2
    names = max(2, int((words // 9) ** rng.uniform(0.3, 1)))
    if kind == "echo":
        phrases, room = [], (tokens - 6) // 2
        while room >= 3:
            phrases.append(" ".join(rng.choices(WORDS, k=min(room - 1, rng.randint(2, 5)))))
            room -= len(phrases[-1].split()) + 1
        return Dialogue(". ".join(phrases), [("", tuple(rng.sample(phrases, len(phrases))))])
    if kind == "recite":
        count = rng.randint(2, max(2, (tokens - 5) // 10))
        pairs = zip(write.names(count), write.values(count), strict=True)
        facts = [f"{name}: {value}" for name, value in pairs]
        return Dialogue(". ".join(facts) + ".", [("", tuple(rng.sample(facts, count)))])
    if kind == "needles":
        names = rng.randint(1, 3)
        found = tasks.needles(write, tokens - 15 * names - SLACK, names, 1, 1, names)
    elif kind == "many":
        turns = min(turns, names)
        found = tasks.needles(write, tokens - 15 * turns - SLACK, names, 1, 1, turns)
    elif kind == "values":
        names = rng.randint(1, 4 if tokens > 400 else 2)
        found = tasks.needles(write, tokens - 25 * names - SLACK, names, 4, 1, names)
    elif kind == "queries":
        names, turns = max(4, names), max(1, turns // 3)
        found = tasks.needles(write, tokens - 46 * turns - SLACK, names, 1, 4, turns)
    elif kind == "lines":
        found = tasks.lines(write, words, turns)
    elif kind == "vt":
        found = tasks.tracking(write, tokens - 20 * min(turns, 6) - SLACK, turns, rng.randint(2, 4))
    elif kind == "cwe":
        found = tasks.common_words(write, tokens - 24)
    else:
        # Rare words count once at least, which makes a short text longer than asked.
        found = tasks.frequent_words(write, tokens - 40)
    # Nobody asks twice: a repeated question would be answered from its first answer.
    return Dialogue(found.context, list(dict.fromkeys(found.turns)), found.separator)


def encode(
    tokenizer: PreTrainedTokenizerFast, found: Dialogue, tokens: int
) -> tuple[list[int], list[bool]]:
    """Token ids of a dialogue and which of them are answers; cut at ``tokens`` whole turns."""
    pieces = [found.context]
    for question, answers in found.turns:
        pieces += [question, found.separator.join(answers)]
    parts = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    user, assistant, end = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])
    ids, answer = [user, *parts[0]], [False] * (len(parts[0]) + 1)
    for turn in range(len(found.turns)):
        question, reply = parts[1 + 2 * turn], [*parts[2 + 2 * turn], end]
        opening = [user] * (turn > 0) + [*question, assistant]
        if turn and len(ids) + len(opening) + len(reply) > tokens:
            break
        ids += opening + reply
        answer += [False] * len(opening) + [True] * len(reply)
    return ids[:tokens], answer[:tokens]


def batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    size: int,
    tokens: int,
    mix: Mapping[str, float] = MIX,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [size, tokens] int64 (padded) and answer mask [size, tokens] bool."""
    ids = torch.full((size, tokens), tokenizer.pad_token_id)
    answer = torch.zeros((size, tokens), dtype=torch.bool)
    for row in range(size):
        row_ids, row_answer = encode(tokenizer, dialogue(rng, tokens, mix), tokens)
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        answer[row, : len(row_ids)] = torch.tensor(row_answer)
    return ids, answer
