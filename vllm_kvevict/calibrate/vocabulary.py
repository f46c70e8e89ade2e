"""Words of which documents are made: names and sentences of every Python, and invented values.

Evaluations share no name and no value with them.
"""

import importlib
import inspect
import keyword
import random
import re
from functools import lru_cache

from vllm_kvevict.calibrate.facts import (
    CALLED,
    FIRST,
    LAST,
    TOWNS,
    Value,
    code,
    date,
    number,
    one_of,
)

MODULES = (
    "argparse calendar codecs configparser csv datetime difflib email.message functools gzip "
    "hashlib heapq http.client imaplib ipaddress itertools json locale logging mailbox math "
    "multiprocessing.pool optparse os pathlib pickle plistlib pprint queue random sched selectors "
    "shelve shutil smtplib socket sqlite3 ssl statistics string struct subprocess tarfile tempfile "
    "textwrap threading timeit tokenize traceback types unittest urllib.parse urllib.request uuid "
    "warnings wave xml.dom.minidom zipfile"
).split()
"""Modules of the standard library whose functions lend their names and parameters."""

SYLLABLES = (
    "ba cor del fen gri hol jun kas lim mo nar ost pel qui rav sel tor ulm vex wyn zem".split()
)
GOODS = (
    "bolt|bracket|cable|canvas|cement|charger|chisel|drill|filter|funnel|gasket|glove|hinge|hose|"
    "boiler|ladder|lens|magnet|mattock|needle|nozzle|paddle|pallet|pulley|pump|rope|sensor|shovel|"
    "spring|stapler|tarpaulin|thermometer|torch|tripod|valve|washer|wrench|zipper"
).split("|")
COLOURS = "amethyst azure beige coral fawn indigo khaki lavender magenta mauve olive teal".split()
UNITS = "bytes seconds pixels rows degrees litres kilometres milligrams volts percent".split()
TYPES = "int float str bytes path list mapping callable duration".split()
MATTERS = (
    "the new roof|the autumn timetable|the archive|the car park|the translation|the summer school|"
    "the heating|the insurance|the newsletter|the bicycle stands|the canteen|the lift|the fence|"
    "the recruitment|the website|the audit|the training plan|the storage room|the spare parts"
).split("|")


@lru_cache(maxsize=1)
def functions() -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """Functions of the standard library: dotted name, names of parameters, first sentence."""
    found: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for owner, prefix in [(module, name), *_classes(module, name)]:
            for key, member in sorted(vars(owner).items(), key=lambda pair: pair[0]):
                if key.startswith("_") or not callable(member):
                    continue
                summary = _summary(member)
                parameters = _parameters(member)
                if summary and parameters:
                    found[f"{prefix}.{key}"] = (f"{prefix}.{key}", parameters, summary)
    return tuple(found.values())


def _classes(module: object, name: str) -> list[tuple[object, str]]:
    members = sorted(vars(module).items(), key=lambda pair: pair[0])
    return [
        (member, key)
        for key, member in members
        if inspect.isclass(member) and member.__module__ == name and not key.startswith("_")
    ]


def _summary(member: object) -> str:
    """The first sentence of a docstring if it is short, on one line."""
    text = getattr(member, "__doc__", None)
    if not isinstance(text, str):
        return ""
    first = " ".join(inspect.cleandoc(text).split("\n\n")[0].split()).split(". ")[0]
    return first.rstrip(".") if 25 <= len(first) <= 140 and first[0].isupper() else ""


def _parameters(member: object) -> tuple[str, ...]:
    try:
        names = inspect.signature(member).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in names if len(name) > 2 and not name.startswith("_"))


@lru_cache(maxsize=1)
def parameters() -> tuple[str, ...]:
    """Names of parameters, each once."""
    names = {name for _, some, _ in functions() for name in some}
    return tuple(sorted(names - {"self", "cls", "args", "kwargs", "kwds"}))


@lru_cache(maxsize=1)
def summaries() -> tuple[str, ...]:
    """First sentences of docstrings, each once."""
    return tuple(dict.fromkeys(summary for *_, summary in functions()))


def identifiers(rng: random.Random, count: int) -> list[str]:
    """Different names of parameters; some are joined from two."""
    found: dict[str, None] = {}
    pool = parameters()
    while len(found) < count:
        name = rng.choice(pool)
        if rng.random() < 0.6:
            name = f"{name}_{rng.choice(pool)}"
        if not keyword.iskeyword(name):
            found[name.lower()] = None
    return list(found)


def invented(rng: random.Random) -> str:
    """A word that no language has."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def invented_name(rng: random.Random) -> str:
    return invented(rng).capitalize()


def amount(rng: random.Random) -> str:
    digits = rng.choice((2, 2, 3, 3, 4, 5))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def fraction(rng: random.Random) -> str:
    return f"{rng.randrange(0, 40)}.{rng.randrange(1, 1000):03d}".rstrip("0")


def small(rng: random.Random) -> str:
    return f"{rng.randrange(1, 10)}e-{rng.randrange(2, 9)}"


def version(rng: random.Random) -> str:
    return f"{rng.randrange(0, 9)}.{rng.randrange(0, 30)}"


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(5, 23)}:{rng.randrange(10, 60)}"


def word(rng: random.Random) -> str:
    found = re.findall(r"[a-z]{4,9}", rng.choice(summaries()).lower())
    return rng.choice(found) if found else invented(rng)


def path(rng: random.Random) -> str:
    return "/".join(["", *(invented(rng) for _ in range(rng.choice((2, 3))))])


def full_name(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


SETTINGS: tuple[Value, ...] = (
    amount,
    amount,
    amount,
    fraction,
    fraction,
    small,
    word,
    word,
    invented,
    version,
    path,
    code,
)
"""Values of a parameter."""

COLUMNS: tuple[tuple[str, Value], ...] = (
    ("owner", full_name), ("price", number(20, 9000)), ("weight", fraction), ("code", code),
    ("colour", one_of("|".join(COLOURS))), ("town", one_of(TOWNS)), ("delivered", date),
    ("stock", amount), ("supplier", invented_name), ("shelf", lambda rng: code(rng)[:4]),
    ("voltage", number(3, 900)), ("revision", version), ("departure", clock),
    ("label", word), ("length", fraction), ("contact", one_of("|".join(FIRST))),
    ("ship", one_of("|".join(CALLED))),
)  # fmt: skip
"""Columns of tables and fields of records."""
