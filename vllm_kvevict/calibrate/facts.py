"""Facts that probes are learned from: kinds, names and values. Evaluations share none of them."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

Value = Callable[[random.Random], str]

FIRST = (
    "Alice Bruno Clara Dmitri Elena Farid Greta Hugo Ingrid Jonas Keiko Luis Marta Nadia Oscar "
    "Priya"
).split()
LAST = (
    "Adler Bishop Castro Delaney Egan Fischer Gupta Horvat Ito Jensen Kovacs Lindgren Moretti "
    "Nakamura Olsen Petrov"
).split()
PLACES = (
    "harbour museum library airport theatre hospital bakery observatory stadium market"
).split()
COLOURS = "red blue green yellow purple orange white black brown silver".split()
MONTHS = "January March April June October December".split()


def number(low: int, high: int) -> Value:
    return lambda rng: str(rng.randrange(low, high))


def one_of(text: str) -> Value:
    choices = text.split("|")
    return lambda rng: rng.choice(choices)


def code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHKLM") for _ in "ab") + str(rng.randrange(1000, 9999))


def date(rng: random.Random) -> str:
    return f"{rng.randrange(1, 29)} {rng.choice(MONTHS)} {rng.randrange(1900, 2010)}"


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


@dataclass(frozen=True)
class Kind:
    """A kind of facts. ``{n}`` is a person, ``{p}`` a place, ``{c}`` a colour, ``{x}`` the value.

    ``begin`` is how the answer begins, up to the value.
    """

    statement: str
    question: str
    begin: str
    value: Value


KINDS = (
    Kind("{n}'s telephone number is {x}.", "What is {n}'s telephone number?",
         "{n}'s telephone number is", number(10**5, 10**7)),
    Kind("The meeting with {n} takes place in the town of {x}.",
         "Where does the meeting with {n} take place?",
         "The meeting with {n} takes place in the town of",
         one_of("Fernley|Karlstad|Toledo|Varna|Leeds|Porto|Aarhus|Gdansk")),
    Kind("{n} was born on {x}.", "When was {n} born?", "{n} was born on", date),
    Kind("The ticket of {n} has the code {x}.", "Which code has the ticket of {n}?",
         "The ticket of {n} has the code", code),
    Kind("The access code of the {p} is {x}.", "What is the access code of the {p}?",
         "The access code of the {p} is", number(10**5, 10**7)),
    Kind("{n} bought a {x} bicycle last week.", "What colour is the bicycle that {n} bought?",
         "{n} bought a", one_of("|".join(COLOURS))),
    Kind("The favourite dish of {n} is {x}.", "What is the favourite dish of {n}?",
         "The favourite dish of {n} is",
         one_of("mushroom soup|fried rice|apple pie|lentil stew|baked salmon|onion tart")),
    Kind("The train from the {p} leaves at {x}.", "When does the train from the {p} leave?",
         "The train from the {p} leaves at",
         lambda rng: f"{rng.randrange(6, 23)}:{rng.randrange(10, 59)}"),
    Kind("In the {p} there is a painting by {x}.", "Who made the painting in the {p}?",
         "In the {p} there is a painting by", person),
    Kind("{n} works as a {x} in the capital.", "As what does {n} work?", "{n} works as a",
         one_of("plumber|teacher|lawyer|pilot|gardener|nurse|painter|chemist")),
    Kind("The dog of {n} is called {x}.", "What is the dog of {n} called?",
         "The dog of {n} is called", one_of("Rufus|Bella|Max|Luna|Rocky|Daisy|Shadow|Ginger")),
    Kind("The {p} was closed because of {x}.", "Why was the {p} closed?",
         "The {p} was closed because of",
         one_of("heavy snow|a strike|a broken pipe|a power failure|repair work|a flood|a fire")),
    Kind("{n} hid the documents {x}.", "Where did {n} hide the documents?",
         "{n} hid the documents",
         one_of("behind the mirror|in the piano|under the carpet|in the attic|on the roof")),
    Kind("The price of the {c} lamp is {x} dollars.", "What is the price of the {c} lamp?",
         "The price of the {c} lamp is", number(11, 999)),
    Kind("{n} studied {x} at the university.", "What did {n} study?", "{n} studied",
         one_of("geology|history|medicine|music|philosophy|biology|economics|physics")),
    Kind("The password for the account of {n} is {x}.",
         "What is the password for the account of {n}?",
         "The password for the account of {n} is",
         lambda rng: rng.choice("tiger|maple|river|candle|rocket|pebble".split("|"))
         + str(rng.randrange(10, 999))),
    Kind("{n} plans to travel to {x} in the summer.", "Where does {n} plan to travel?",
         "{n} plans to travel to", one_of("Portugal|Iceland|Vietnam|Canada|Morocco|Chile|Kenya")),
    Kind("The bridge near the {p} is {x} metres long.", "How long is the bridge near the {p}?",
         "The bridge near the {p} is", number(40, 2000)),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A sentence of the text, and what is asked and answered about it later."""

    statement: str
    question: str
    begin: str
    answer: str


def draw(rng: random.Random, count: int, kinds: tuple[Kind, ...] = KINDS) -> list[Fact]:
    """Facts of different kinds and about different people, ``count`` of them, at most 16."""
    people, places, colours = (rng.sample(names, len(names)) for names in (FIRST, PLACES, COLOURS))
    found = []
    for index, kind in enumerate(rng.sample(kinds, min(count, len(kinds)))):
        name = people[index % len(people)]
        if rng.random() < 0.5:
            name += f" {rng.choice(LAST)}"
        words = dict(n=name, p=places[index % len(places)], c=colours[index % len(colours)])
        value = kind.value(rng)
        found.append(
            Fact(
                kind.statement.format(x=value, **words),
                kind.question.format(**words),
                kind.begin.format(**words),
                f" {value}.",
            )
        )
    return found


THINGS = "router printer warehouse barge apartment tractor laboratory computer".split()
CALLED = "Atlas Borealis Cobalt Delta Echo Gamma Helios Indigo Juniper Krypton Lotus".split()
TOWNS = "Fernley|Karlstad|Toledo|Varna|Leeds|Porto|Aarhus|Gdansk"
ATTRIBUTES: tuple[tuple[str, Value], ...] = (
    ("owner", person),
    ("price", number(20, 9000)),
    ("opening date", date),
    ("access code", code),
    ("colour", one_of("|".join(COLOURS))),
    ("town", one_of(TOWNS)),
    ("port", number(1024, 60000)),
    ("state", one_of("closed|under repair|rented|sold|ready|on hold")),
    ("supplier", one_of("Kessel Ltd|Brandt & Sons|Orion Trading|Maple Works|Nordwind")),
)
ROWS, COLUMNS = 5, 3

Rows = dict[str, dict[str, str]]
"""Values by the name of a thing and by attribute."""


def _table(thing: str, rows: Rows) -> str:
    head = next(iter(rows.values()))
    cells = [(thing, *head), *((name, *row.values()) for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _json(thing: str, rows: Rows) -> str:
    return json.dumps([{thing: name, **row} for name, row in rows.items()])


def _code(thing: str, rows: Rows) -> str:
    def arguments(row: dict[str, str]) -> str:
        return ", ".join(f"{key.replace(' ', '_')}={value!r}" for key, value in row.items())

    return "\n".join(
        f"{name.lower()}_{thing} = dict({arguments(row)})" for name, row in rows.items()
    )


def _list(thing: str, rows: Rows) -> str:
    def items(row: dict[str, str]) -> str:
        return "; ".join(f"{key} {value}" for key, value in row.items())

    return "\n".join(f"- {thing} {name}: {items(row)}" for name, row in rows.items())


def _dialogue(thing: str, rows: Rows) -> str:
    speakers = itertools.cycle(FIRST[:2])
    return "\n".join(
        f"{next(speakers)}: The {key} of the {thing} {name} is {value}."
        for name, row in rows.items()
        for key, value in row.items()
    )


FORMS = _table, _json, _code, _list, _dialogue


def record(rng: random.Random) -> Fact:
    """Several things with some attributes, in one of :data:`FORMS`; one value is asked for."""
    thing, names = rng.choice(THINGS), rng.sample(CALLED, ROWS)
    columns = rng.sample(ATTRIBUTES, COLUMNS)
    rows = {name: {key: value(rng) for key, value in columns} for name in names}
    name, key = rng.choice(names), rng.choice(columns)[0]
    return Fact(
        rng.choice(FORMS)(thing, rows),
        f"What is the {key} of the {thing} {name}?",
        f"The {key} of the {thing} {name} is",
        f" {rows[name][key]}.",
    )
