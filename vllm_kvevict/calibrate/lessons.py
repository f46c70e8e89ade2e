"""The texts that teach probes: a context, and texts that may follow it."""

import importlib
import inspect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvevict.calibrate.documents import document
from vllm_kvevict.calibrate.facts import draw, record
from vllm_kvevict.calibrate.prompts import PromptsError, from_file
from vllm_kvevict.calibrate.read_prompt import read_prompt

MODULES = (
    "argparse ast asyncio.streams base64 bisect calendar codecs collections configparser "
    "contextlib copy csv datetime decimal difflib doctest email.message enum fractions functools "
    "glob gzip heapq html.parser http.client http.cookies imaplib inspect io ipaddress itertools "
    "json locale logging mailbox mimetypes multiprocessing.pool optparse os pathlib pickle "
    "pickletools platform plistlib pprint queue random re sched selectors shelve shlex shutil "
    "smtplib socket sqlite3 ssl statistics string struct subprocess tarfile tempfile textwrap "
    "threading timeit tokenize trace traceback turtle types typing unittest urllib.parse "
    "urllib.request uuid warnings wave weakref xml.dom.minidom zipfile"
).split()
"""Modules of Python's standard library. Their docstrings are the prose of the contexts."""

SOURCES = "argparse csv calendar queue shlex textwrap statistics zipfile tarfile difflib".split()
"""Modules of Python's standard library whose code stands between the facts of some contexts."""

FACTS = 6
RECORDS = 2
"""Facts of a varied context that are in records: tables, JSON, code, lists and dialogues."""

PLAIN = 0.35
"""Share of the answers in varied contexts that begin with the value, without an opening."""

PLAIN_TEXT, DENSE, CODE = range(3)
"""Kinds of contexts: facts in prose, documents in which everything is asked, facts in prose and
code."""

TURN, AFTER = (PLAIN_TEXT, DENSE, CODE, DENSE), 6
"""Kinds of contexts in a row. After so many contexts the row moves by one, so that any regular
choice among contexts, as of those held out, has all kinds."""

QUESTIONS = 16
"""Most questions about a document in which everything may be asked."""

FOLLOWING = 80
"""Tokens of the prose that continues a context."""

MOST_OF_PROMPT = 320
"""Tokens at the end of an operator's prompt that are what comes later."""

ASIDE = 160
"""Tokens that a question and the chat template take at most."""


@dataclass(frozen=True)
class Later:
    """Token ids after a context; the last ``answer`` of them are an answer.

    ``asked`` counts the tokens of the question, before the answer's opening; 0 if none is asked.
    """

    ids: list[int]
    answer: int
    asked: int = 0


@dataclass(frozen=True)
class Lesson:
    """A context, and texts that follow it."""

    context: list[int]
    later: list[Later]


def prose() -> list[str]:
    """Paragraphs of docstrings, in a fixed order."""
    found: dict[str, None] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        members = [module, *(value for _, value in sorted(vars(module).items(), key=_name))]
        for member in members:
            if member is module or getattr(member, "__module__", None) == module.__name__:
                _add(found, member)
                if inspect.isclass(member):
                    for _, inner in sorted(vars(member).items(), key=_name):
                        _add(found, inner)
    return list(found)


def source() -> list[str]:
    """Pieces of the standard library's code, without docstrings, in a fixed order.

    Empty if Python was installed without its sources.
    """
    found: list[str] = []
    for name in SOURCES:
        try:
            text = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError):
            continue
        parts = (part.rstrip() for part in re.split(r"\n\s*\n", text))
        found += [part for part in parts if 60 <= len(part) <= 800 and '"""' not in part]
    return found


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _add(found: dict[str, None], member: Any) -> None:
    text = getattr(member, "__doc__", None)
    if isinstance(text, str):
        for paragraph in split(inspect.cleandoc(text)):
            found.setdefault(paragraph)


def split(text: str) -> list[str]:
    """Paragraphs of a text that say something: on one line each, neither short nor endless."""
    lines = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [line for line in lines if 60 <= len(line) <= 800]


def documents(paths: Sequence[Path]) -> list[str]:
    """Paragraphs of an operator's own files, or of the files in folders of them.

    Raises:
        PromptsError: A file cannot be read, or all of them together are too short.

    """
    found: list[str] = []
    for path in paths:
        inside = (one for one in sorted(path.rglob("*")) if one.is_file())
        files = list(inside) if path.is_dir() else [path]
        for file in files:
            try:
                found += split(file.read_text(encoding="utf-8", errors="replace"))
            except OSError as error:
                raise PromptsError(f"--documents: {file}: {error.strerror}") from None
    if len(found) < 100:
        raise PromptsError(
            f"--documents: {len(found)} paragraphs of 60 characters and more are too few to hide "
            "facts among; give 100 or more"
        )
    return found


def lessons(
    tokenizer: Any,
    paragraphs: Sequence[str],
    count: int,
    length: int,
    seed: str,
    varied: bool = False,
) -> list[Lesson]:
    """Contexts of prose with facts in it, what is asked of them, and how the prose goes on.

    Args:
        tokenizer: The model's.
        paragraphs: The prose.
        count: How many.
        length: Tokens of a context with a question and the chat template.
        seed: Contexts of other seeds have other facts at other places.
        varied: Whether half of the contexts are documents in which everything is asked, and a
            quarter have code between the facts and records among them, and answers without an
            opening.

    """
    chat = bool(getattr(tokenizer, "chat_template", None))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    code = source() if varied else []
    found = []
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        kind = TURN[(index + index // AFTER) % len(TURN)] if varied else PLAIN_TEXT
        if kind == DENSE:
            found.append(_document(rng, index // 2, tokenizer, encode, length, chat))
            continue
        pieces = code if kind == CODE else []
        found.append(_lesson(rng, tokenizer, encode, paragraphs, length, chat, pieces))
    return found


HEADS = (
    "", "", "Here is a text.", "Attached you find what you asked for.", "Please keep this at hand:",
    "This is the material:",
)  # fmt: skip


def _document(
    rng: random.Random,
    index: int,
    tokenizer: Any,
    encode: Callable[[str], list[int]],
    length: int,
    chat: bool,
) -> Lesson:
    """A document in which everything may be asked, and questions about some of it."""
    room = max(32, length - ASIDE)
    characters, seed = 2 * room, rng.random()
    for _ in range(6):
        made = document(random.Random(seed), index, characters)
        tokens = len(encode(made.text))
        if 0.8 * room <= tokens <= room:
            break
        characters = max(60, int(0.92 * characters * room / tokens))
    head = rng.choice(HEADS)
    text = f"{head}\n{made.text}" if head else made.text
    found, context = [], []
    for one in rng.sample(made.asked, min(QUESTIONS, len(made.asked))):
        prompt = read_prompt(tokenizer, text, one.question, None, chat)
        context = prompt.ids[: prompt.context]
        begin = "" if rng.random() < PLAIN else one.begin
        answer = encode(begin if chat or not begin else f" {begin}")
        said = encode(f" {one.value}." if begin or not chat else f"{one.value}.")
        question = prompt.ids[prompt.context :]
        found.append(Later([*question, *answer, *said], len(said), len(question)))
    # A document of this kind has no end: how it goes on is another of its kind.
    more = document(random.Random(f"{seed} more"), index, 4 * FOLLOWING)
    goes_on = encode(f"\n{more.text}")[:FOLLOWING]
    found.append(Later(goes_on, len(goes_on) - 1))
    return Lesson(context, found)


def _lesson(
    rng: random.Random,
    tokenizer: Any,
    encode: Callable[[str], list[int]],
    paragraphs: Sequence[str],
    length: int,
    chat: bool,
    code: Sequence[str],
) -> Lesson:
    facts = draw(rng, FACTS - RECORDS if code else FACTS)
    facts += [record(rng) for _ in range(FACTS - len(facts))]
    room = max(32, length - ASIDE - sum(len(encode(fact.statement)) for fact in facts))
    at, tokens = rng.randrange(len(paragraphs)), 0
    lines: list[str] = []
    while tokens < room:
        # Every other piece of a varied context is code.
        pieces = code if code and len(lines) % 2 else paragraphs
        lines.append(pieces[at % len(pieces)])
        tokens += len(encode(lines[-1])) + 1
        at += 1
    for fact in facts:
        lines.insert(rng.randrange(len(lines) + 1), fact.statement)
    text = "\n".join(lines)
    found, context = [], []
    for fact in facts:
        prompt = read_prompt(tokenizer, text, fact.question, None, chat)
        context = prompt.ids[: prompt.context]
        answer = encode(f" {fact.begin}" if not chat else fact.begin)
        said = encode(fact.answer)
        if code and rng.random() < PLAIN:
            answer, said = [], encode(fact.answer.lstrip() if chat else fact.answer)
        question = prompt.ids[prompt.context :]
        found.append(Later([*question, *answer, *said], len(said), len(question)))
    goes_on = encode("\n" + "\n".join(paragraphs[(at + i) % len(paragraphs)] for i in range(6)))
    found.append(Later(goes_on[:FOLLOWING], min(FOLLOWING, len(goes_on)) - 1))
    return Lesson(context, found)


def of_prompts(path: Path, tokenizer: Any) -> list[Lesson]:
    """Return an operator's prompts: the text after a context is the prompt's own end.

    Raises:
        PromptsError: As ``from_file``, or a prompt is too short.

    """
    found = []
    for ids in from_file(path, tokenizer):
        later = min(len(ids) // 4, MOST_OF_PROMPT)
        if later < 16:
            raise PromptsError(f"--prompts: {path}: a prompt of {len(ids)} tokens is too short")
        found.append(Lesson(ids[:-later], [Later(ids[-later:], later - 1)]))
    return found
