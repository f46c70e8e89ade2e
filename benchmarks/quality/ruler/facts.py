"""One natural fact in vLLM's docstrings. Calibrate learns of no such kind, name, value or prose."""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from benchmarks.quality.ruler.prose import SENTENCE_END, is_prose
from benchmarks.quality.ruler.sample import RulerSample

CONTEXT = "Read the following text. I will ask you about it afterwards.\n{text}"

FIRST = (
    "Tobias Wendy Yusuf Agnes Boris Carmen Derek Esther Felicity Gavin Harriet Isaac Judith Konrad "
    "Leonie Maurice"
).split()
LAST = (
    "Abernathy Blackwood Cardoso Dietrich Ellison Fairchild Grimaldi Hathaway Ibsen Jankowski "
    "Keller Lockhart Marchetti Norwood"
).split()

Value = Callable[[random.Random], str]


def of(text: str) -> Value:
    return lambda rng: rng.choice(text.split("|"))


def number(low: int, high: int) -> Value:
    return lambda rng: str(rng.randrange(low, high))


Kind = tuple[str, str, str, Value]
"""The fact, the question, how its answer begins, and the answer. ``{n}`` is a name."""

KINDS: tuple[Kind, ...] = (
    ("{n} keeps the spare key to the greenhouse under the {x}.",
     "Where does {n} keep the spare key to the greenhouse?",
     "{n} keeps the spare key to the greenhouse under the",
     of("flower pot|stone bench|rain barrel|garden gnome|wooden crate")),
    ("Captain {n} named the sailing boat {x}.", "What did Captain {n} name the sailing boat?",
     "Captain {n} named the sailing boat",
     of("Silver Heron|Northern Star|Morning Glory|Sea Falcon|Lucky Wanderer")),
    ("The secret ingredient of {n}'s cake is {x}.", "What is the secret ingredient of {n}'s cake?",
     "The secret ingredient of {n}'s cake is", of("cardamom|saffron|nutmeg|rosemary|honey")),
    ("The lighthouse was built by the engineer {n} in the year {x}.",
     "In which year did {n} build the lighthouse?", "{n} built the lighthouse in the year",
     number(1700, 1900)),
    ("The village choir, led by {n}, meets every {x}.",
     "When does the village choir led by {n} meet?", "The village choir led by {n} meets every",
     of("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday")),
    ("The safe in {n}'s office opens with the combination {x}.",
     "Which combination opens the safe in {n}'s office?",
     "The safe in {n}'s office opens with the combination", number(10**5, 10**6)),
    ("Doctor {n} prescribed {x} against the fever.",
     "What did Doctor {n} prescribe against the fever?", "Doctor {n} prescribed",
     of("willow bark|cold baths|lemon tea|quinine|bed rest")),
    ("{n} found {x} coins in the old well.", "How many coins did {n} find in the old well?",
     "{n} found", number(12, 900)),
    ("The shop of {n} sells mostly {x}.", "What does the shop of {n} mostly sell?",
     "The shop of {n} sells mostly", of("umbrellas|clocks|candles|violins|carpets|lanterns")),
    ("{n} lost the race because of {x}.", "Why did {n} lose the race?",
     "{n} lost the race because of",
     of("a flat tyre|a swollen knee|thick fog|a loose shoelace|a wrong turn")),
    ("The parcel for {n} weighs {x} grams.", "How much does the parcel for {n} weigh?",
     "The parcel for {n} weighs", number(120, 9000)),
    ("Behind the mill, {n} planted {x}.", "What did {n} plant behind the mill?",
     "Behind the mill, {n} planted",
     of("cherry trees|tulips|cabbages|sunflowers|barley|vines")),
    ("{n} plays the {x} in the orchestra.", "Which instrument does {n} play in the orchestra?",
     "{n} plays the", of("bassoon|cello|clarinet|oboe|trumpet|harp|viola")),
    ("{n} moved from the coast to {x} last winter.", "Where did {n} move last winter?",
     "{n} moved from the coast to", of("Salzburg|Grenoble|Innsbruck|Cordoba|Debrecen|Bergamo")),
)  # fmt: skip


def statements(module: ast.Module) -> Iterator[ast.AST]:
    """The module and all that holds statements, in the order of ``ast.walk``, which takes longer:
    it looks into expressions, too."""
    nodes: list[ast.AST] = [module]
    for node in nodes:
        yield node
        for field in node._fields:
            if field in ("body", "orelse", "handlers", "finalbody", "cases"):
                nodes += getattr(node, field)


@lru_cache
def sentences(package: str = "vllm") -> tuple[str, ...]:
    """Sentences of the docstrings in a package's files, which are read and not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    found: dict[str, None] = {}
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for block in (ast.get_docstring(node) or "").split("\n\n"):
                    text = " ".join(block.split())
                    if text and is_prose(text):
                        found.update(dict.fromkeys(SENTENCE_END.split(text)))
    return tuple(found)


def fact(
    rng: random.Random,
    task: str,
    characters: int,
    kinds: Sequence[Kind] = KINDS,
    package: str = "vllm",
) -> RulerSample:
    """One fact, asked for.

    Args:
        rng: Draws the kind, the name, the answer, and the places of the fact and of the prose.
        task: Name of the task.
        characters: Of the prose.
        kinds: Of facts.
        package: Whose docstrings are the prose.

    """
    statement, question, prefix, value = rng.choice(kinds)
    name, answer = f"{rng.choice(FIRST)} {rng.choice(LAST)}", value(rng)
    pool, text, length = sentences(package), [], 0
    place = rng.randrange(len(pool))
    while length < characters:
        text.append(pool[place % len(pool)])
        length += len(text[-1]) + 1
        place += 1
    text.insert(rng.randrange(len(text) + 1), statement.format(n=name, x=answer))
    return RulerSample(
        task,
        CONTEXT.format(text=" ".join(text)),
        question.format(n=name),
        prefix.format(n=name),
        (answer,),
        max_tokens=16,
    )
