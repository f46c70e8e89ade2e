"""Documents in which everything may be asked, and questions about most of it.

A learned score is as good as the variety of what it was asked. Prose with a few facts teaches which
tokens look like a fact; these teach what to keep where every line is one. Documents are generated
from the standard library's names and sentences and from invented values, so that each differs, and
no model can know an answer.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_kvevict.calibrate.facts import CALLED, FIRST, code, date
from vllm_kvevict.calibrate.vocabulary import (
    COLOURS,
    COLUMNS,
    GOODS,
    MATTERS,
    SETTINGS,
    TYPES,
    UNITS,
    amount,
    clock,
    full_name,
    functions,
    identifiers,
    invented_name,
    summaries,
    version,
)


@dataclass(frozen=True)
class Asked:
    """A question, how its answer begins (empty if it begins with the value), and the value."""

    question: str
    begin: str
    value: str


@dataclass
class Document:
    """Lines of a text and what may be asked about them."""

    lines: list[str] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def add(self, line: str, *asked: Asked) -> None:
        self.lines.append(line)
        self.asked += asked

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


Make = Callable[[random.Random, int], Document]
"""Makes a document of at least so many characters."""

Wordings = Sequence[tuple[str, str]]
"""Questions and how their answers begin, with the same fields in braces."""


def ask(rng: random.Random, wordings: Wordings, value: str, **names: str) -> Asked:
    """A question in one of several wordings."""
    question, begin = rng.choice(wordings)
    return Asked(question.format(**names), begin.format(**names), value)


def _long(document: Document, characters: int) -> bool:
    return sum(len(line) + 1 for line in document.lines) >= characters


UNSET = (
    ("What is used for `{n}` when the caller leaves it out?", "When it is left out, `{n}` is"),
    ("If I do not set {n}, what will it be?", "Without being set, {n} will be"),
    ("Which setting does {n} start with?", "{n} starts with"),
    ("What does `{n}` fall back to?", "`{n}` falls back to"),
    ("Default of {n}?", "{n}:"),
    ("Tell me the default for the argument {n}.", "The default for the argument {n} is"),
    ("{n} =", ""),
)
TYPED = (
    ("Of which type is {n}?", "{n} is of type"),
    ("What type must I pass as `{n}`?", "`{n}` takes"),
)
SINCE = (
    ("Since which release is there {n}?", "{n} is there since release"),
    ("When was `{n}` added?", "`{n}` was added in"),
)
MEANT = (
    ("What is {n} for?", "{n}:"),
    ("Explain `{n}` in the words of the text.", "`{n}`:"),
    ("How is {n} described?", "{n} is described as:"),
)
MEASURED = (
    ("In what unit is {n} given?", "{n} is given in"),
    ("Is `{n}` in seconds, bytes, or what?", "`{n}` is in"),
)


def _opening(text: str, words: int = 9) -> str:
    return " ".join(text.split()[:words])


STYLES = (
    ":param {kind} {n}: {told}. Given in {unit}. {value} if left out. New in {since}.",
    ":param {n}: {told}. {value} if left out.\n:type {n}: {kind}",
    "{n} : {kind}, default={value}\n    {told} (in {unit}).\n    .. added: {since}",
    "{n} : {kind}, default={value}\n    {told}.",
    "    {n} ({kind}): {told}. Unit: {unit}. Since {since}. Default: {value}.",
    "    {n} ({kind}; {value} if absent): {told}.",
    "    {n} ({kind}, {unit}): {told}. Absent, it counts as {value}.",
    "  --{n} {kind}  {told}, {unit} [default: {value}; from {since}]",
    "  --{n}={value}\n        {told}.",
    "{n}\n    {told}. A {kind} in {unit}, initially {value}, known from {since} on.",
    "* **{n}** - {told}. Type {kind}; unit {unit}; {value} unless set; since {since}",
    "* `{n}` [{value}]: {told}.",
    "<dt>{n}</dt><dd>{told}. <b>{kind}</b>, preset to {value}.</dd>",
    "{n}: Optional[{kind}] = {value}  # {told}",
)
"""Ways to document a parameter: its name, type, default, unit, release and meaning."""

MORE: tuple[tuple[str, Wordings], ...] = (
    ("kind", TYPED), ("unit", MEASURED), ("since", SINCE), ("told", MEANT),
)  # fmt: skip


def parameters(rng: random.Random, characters: int) -> Document:
    """Parameters of an invented program, documented in one of :data:`STYLES`."""
    found, style, sentences = Document(), rng.choice(STYLES), rng.choice((1, 1, 2, 3))
    said = [(part, wordings) for part, wordings in MORE if f"{{{part}}}" in style]
    for n in identifiers(rng, characters // 40 + 1):
        if _long(found, characters):
            break
        told = ". ".join(rng.sample(summaries(), rng.randrange(1, sentences + 1)))
        parts = dict(
            n=n, kind=rng.choice(TYPES), unit=rng.choice(UNITS), since=version(rng),
            value=rng.choice(SETTINGS)(rng), told=told,
        )  # fmt: skip
        part, wordings = rng.choice(said)
        other = _opening(parts[part]) if part == "told" else parts[part]
        asked = ask(rng, UNSET, parts["value"], n=n), ask(rng, wordings, other, n=n)
        found.add(style.format(**parts), *asked[: 2 if rng.random() < 0.5 else 1])
    return found


CALLS = (
    ("With what does {f} fill `{n}`?", "{f} fills `{n}` with"),
    ("Which {n} does {f} assume?", "{f} assumes {n} ="),
    ("{f}: what is {n} unless I say so?", "It is"),
)
PURPOSE = (
    ("What does {f} do?", "{f}:"),
    ("Quote the line that explains {f}.", ""),
    ("Which sentence stands below {f}?", "Below {f} stands:"),
)


def signatures(rng: random.Random, characters: int) -> Document:
    """Functions of the standard library, with other defaults than theirs, and what they do."""
    found = Document()
    for name, names, told in rng.sample(functions(), len(functions())):
        if _long(found, characters):
            break
        chosen = [n for n in names if n not in ("self", "cls")][:5]
        values = {n: rng.choice(SETTINGS)(rng) for n in chosen if rng.random() < 0.7}
        shown = (
            f"{n}={values[n] if values[n][0].isdigit() else repr(values[n])}" if n in values else n
            for n in chosen
        )
        asked = [ask(rng, CALLS, value, f=name, n=n) for n, value in values.items()]
        asked.append(ask(rng, PURPOSE, _opening(told), f=name))
        found.add(f"{name}({', '.join(shown)})\n    {told}.", *asked)
    return found


CELLS = (
    ("What is the {k} of the {n}?", "The {k} of the {n} is"),
    ("{n}: {k}?", ""),
    ("Look up the {k} for {n}.", "{k} for {n}:"),
    ("Give me {n}'s {k}.", "{n}'s {k} is"),
    ("Which {k} belongs to {n}?", "{n} has the {k}"),
    ("Find the row of {n}. What stands under {k}?", "Under {k} stands"),
)
REVERSED = (
    ("Which entry has the {k} {x}?", "The entry with the {k} {x} is"),
    ("To what belongs the {k} {x}?", "The {k} {x} belongs to"),
)

Cells = dict[str, dict[str, str]]
"""Values by the name of a row and of a column."""


def _cells(rng: random.Random, characters: int, width: int) -> Cells:
    columns = rng.sample(COLUMNS, rng.randrange(2, 5))
    count = max(4, characters // (len(columns) * width + 12))
    names: dict[str, None] = {}
    kinds = rng.choice((GOODS, CALLED, None))
    while len(names) < count:
        first = rng.choice(kinds) if kinds else invented_name(rng)
        plain = kinds is None or (kinds is GOODS and count < len(GOODS) // 2)
        names[first if plain else f"{first} {code(rng)[:4]}"] = None
    return {name: {key: make(rng) for key, make in columns} for name in names}


def _ask_cells(rng: random.Random, cells: Cells) -> list[Asked]:
    asked = [
        ask(rng, CELLS, value, k=key, n=name)
        for name, row in cells.items()
        for key, value in row.items()
    ]
    key = rng.choice(list(next(iter(cells.values()))))
    values = [row[key] for row in cells.values()]
    alone = [name for name, row in cells.items() if values.count(row[key]) == 1]
    return asked + [ask(rng, REVERSED, name, k=key, x=cells[name][key]) for name in alone]


def table(rng: random.Random, characters: int) -> Document:
    """A table: Markdown, comma- or tab-separated, or columns of equal width."""
    cells = _cells(rng, characters, 10)
    head = ["name", *next(iter(cells.values()))]
    rows = [head, *([name, *row.values()] for name, row in cells.items())]
    form = rng.randrange(4)
    if form == 0:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|" + " --- |" * len(head))
    elif form == 3:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        pairs = (zip(row, widths, strict=True) for row in rows)
        lines = ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in pairs]
    else:
        lines = [(",", "\t")[form - 1].join(row) for row in rows]
    return Document(lines, _ask_cells(rng, cells))


def records(rng: random.Random, characters: int) -> Document:
    """Records: JSON, indented keys, XML, a mapping in code, or blocks of lines."""
    cells = _cells(rng, characters, 22)
    form = rng.randrange(5)
    if form == 0:
        indent = rng.choice((None, 1))
        lines = [json.dumps([{"name": n, **row} for n, row in cells.items()], indent=indent)]
    elif form == 1:
        lines = [
            "\n".join([f"{n}:", *(f"  {key}: {value}" for key, value in row.items())])
            for n, row in cells.items()
        ]
    elif form == 2:
        lines = [
            f'<item name="{n}">' + "".join(f"<{k}>{v}</{k}>" for k, v in row.items()) + "</item>"
            for n, row in cells.items()
        ]
    elif form == 3:
        lines = ["ITEMS = {", *(f"    {n!r}: {row!r}," for n, row in cells.items()), "}"]
    else:
        lines = [
            "\n".join([f"Name: {n}", *(f"{k.capitalize()}: {v}" for k, v in row.items()), ""])
            for n, row in cells.items()
        ]
    return Document(lines, _ask_cells(rng, cells))


HOLDS = (
    ("What does {n} hold?", "{n} holds"),
    ("What is assigned to `{n}`?", "To `{n}` is assigned"),
    ("{n} =", ""),
    ("Print {n}.", "{n} is"),
)
RETURNS = (
    ("What does {n}() return?", "{n}() returns"),
    ("Result of calling `{n}`?", "The result is"),
)
CALLED_WITH = (
    ("Which {k} is passed to {n}?", "{n} gets {k}="),
    ("In the call of `{n}`, what is {k}?", "{k} ="),
)


def source(rng: random.Random, characters: int) -> Document:
    """Code: constants, functions that return something, and calls."""
    found = Document()
    names = iter(identifiers(rng, characters // 20 + 40))
    while not _long(found, characters):
        n, form, value = next(names), rng.randrange(4), rng.choice(SETTINGS)(rng)
        said = value if value.replace(".", "").isdigit() else repr(value)
        if form == 0:
            found.add(f"{n.upper()} = {said}", ask(rng, HOLDS, value, n=n.upper()))
        elif form == 1:
            text = f'def {n}(self):\n    """{rng.choice(summaries())}."""\n    return {said}\n'
            found.add(text, ask(rng, RETURNS, value, n=n))
        elif form == 2:
            chosen = {next(names): rng.choice(SETTINGS)(rng) for _ in range(3)}
            given = ", ".join(f"{k}={v!r}" for k, v in chosen.items())
            asked = [ask(rng, CALLED_WITH, v, n=n, k=k) for k, v in chosen.items()]
            found.add(f"self.{n}({given})", *asked)
        else:
            head = n.title().replace("_", "")
            fields = {next(names): rng.choice(SETTINGS)(rng) for _ in range(3)}
            rows = (f"    {k} = {v!r}" for k, v in fields.items())
            asked = [ask(rng, HOLDS, v, n=f"{head}.{k}") for k, v in fields.items()]
            found.add("\n".join([f"class {head}:", *rows, ""]), *asked)
    return found


TOLD: tuple[tuple[str, Wordings, Callable[[random.Random], str]], ...] = (
    ("the {g} costs {x} crowns", (("How many crowns is the {g}?", "The {g} costs"),
     ("Cost of the {g}?", ""), ("What do they ask for the {g}?", "For the {g} they ask")), amount),
    ("{m} is on the agenda on {x}", (("On which day do they talk about {m}?",
     "They talk about {m} on"), ("When does {m} come up?", "{m} comes up on")), date),
    ("we ordered {x} of the {g}s", (("How many {g}s were ordered?", "The order was for"),
     ("Number of {g}s in the order?", "")), amount),
    ("{x} looks after {m}", (("Who looks after {m}?", "{m} is looked after by"),
     ("Whom do I call about {m}?", "About {m} you call"), ("Responsible for {m}?", "")), full_name),
    ("the {g} arrives at {x}", (("At what time does the {g} arrive?", "The {g} arrives at"),
     ("When will the {g} be here?", "It will be here at")), clock),
    ("the {g} has the inventory mark {x}", (("Inventory mark of the {g}?", ""),
     ("How is the {g} marked in the inventory?", "The {g} is marked")), code),
    ("they want the {g} in {x}", (("In which shade do they want the {g}?", "They want the {g} in"),
     ("Shade of the {g}?", "")), lambda rng: rng.choice(COLOURS)),
    ("the {g} comes from a firm called {x}", (("Which firm makes the {g}?",
     "The {g} is made by"), ("Where does the {g} come from?", "It comes from")), invented_name),
    ("the {g} must be kept below {x} degrees", (("How warm may the {g} get?",
     "The {g} must stay below"), ("Limit in degrees for the {g}?", "")), amount),
    ("{m} has a budget of {x} crowns", (("How much may be spent on {m}?", "On {m} may be spent"),
     ("What is the budget for {m}?", "The budget for {m} is")), amount),
)  # fmt: skip
"""What people tell one another: a clause, questions about it, and the value."""


def _told(rng: random.Random, used: set[str]) -> tuple[str, Asked] | None:
    clause, wordings, make = rng.choice(TOLD)
    names = {"g": rng.choice(GOODS), "m": rng.choice(MATTERS)}
    about = clause.format(x="", **names)
    if about in used:
        return None
    used.add(about)
    value = make(rng)
    return clause.format(x=value, **names), ask(rng, wordings, value, **names)


def _clauses(rng: random.Random, characters: int, line: Callable[[int, str, str], str]) -> Document:
    """Clauses of :data:`TOLD`, each said by somebody on a line of its own."""
    found, used = Document(), set[str]()
    people = rng.sample(FIRST, 3)
    misses = 0
    while not _long(found, characters) and misses < 200:
        if (told := _told(rng, used)) is None:
            misses += 1
            continue
        found.add(line(len(found.lines) + 1, rng.choice(people), told[0]), told[1])
    return found


def _sentence(clause: str) -> str:
    return clause[0].upper() + clause[1:] + "."


LEADS = "Listen:|By the way,|As I said,|Right.|Good to hear.|One more thing:|I see.|Hm,".split("|")


def dialogue(rng: random.Random, characters: int) -> Document:
    """A conversation in which each turn tells something."""

    def line(_: int, who: str, clause: str) -> str:
        return f"{who}: {rng.choice(LEADS)} {_sentence(clause)}"

    return _clauses(rng, characters, line)


def minutes(rng: random.Random, characters: int) -> Document:
    """Minutes of a meeting in numbered items."""

    def line(index: int, who: str, clause: str) -> str:
        verb = rng.choice(("reports that", "notes that", "confirms that", "objects: so far"))
        return f"{index}. {who} {verb} {clause}."

    found = _clauses(rng, characters - 60, line)
    found.lines.insert(0, f"Minutes of the meeting of {date(rng)}, {clock(rng)} o'clock")
    return found


def letters(rng: random.Random, characters: int) -> Document:
    """Letters of some sentences each."""
    found, used, misses = Document(), set[str](), 0
    while not _long(found, characters) and misses < 200:
        sender, day, sentences, asked = full_name(rng), date(rng), list[str](), list[Asked]()
        while len(sentences) < 4 and misses < 200:
            told = _told(rng, used)
            if told is None:
                misses += 1
                continue
            filler = rng.choice(summaries())
            sentences += [_sentence(told[0])] + ([f"{filler}."] if rng.random() < 0.3 else [])
            asked.append(told[1])
        wordings = (("When did {n} write?", "{n} wrote on"), ("Date of {n}'s letter?", ""))
        asked.append(ask(rng, wordings, day, n=sender))
        body = " ".join(sentences)
        found.add(f"{day}\nDear {rng.choice(FIRST)},\n{body}\nYours, {sender}\n", *asked)
    return found


STEPS: tuple[tuple[str, Wordings], ...] = (
    ("turn the {g} by {x} degrees", (("By how many degrees is the {g} turned?",
     "The {g} is turned by"), ("Angle for the {g}?", ""))),
    ("cut the {g} to {x} millimetres", (("To what length is the {g} cut?",
     "The {g} is cut to"), ("Millimetres of the {g}?", ""))),
    ("heat the {g} for {x} minutes", (("How long is the {g} heated?", "The {g} is heated for"),
     ("Minutes for the {g}?", ""))),
    ("mount {x} of the {g}s", (("How many {g}s are mounted?", "The number of {g}s is"),)),
    ("set the {g} to {x} bar", (("What pressure does the {g} get?", "The {g} is set to"),
     ("Bar at the {g}?", ""))),
    ("wait until the {g} shows {x}", (("What must the {g} show before one goes on?",
     "The {g} must show"),)),
)  # fmt: skip


def instructions(rng: random.Random, characters: int) -> Document:
    """Numbered steps; asked by what is handled and by the number of the step."""
    found = Document()
    goods = [f"{kind}{good}" for good in GOODS for kind in ("", "upper ", "small ", "rear ")]
    for good in rng.sample(goods, len(goods)):
        if _long(found, characters):
            break
        clause, wordings = rng.choice(STEPS)
        value, step = amount(rng), len(found.lines) + 1
        text = clause.format(g=good, x=value)
        numbered = (("What is done in step {n}?", "In step {n} you"), ("Step {n}?", ""))
        asked = [ask(rng, wordings, value, g=good), ask(rng, numbered, text, n=str(step))]
        found.add(f"Step {step}: {_sentence(text)}", *asked)
    return found


GOES_ON = (
    ('How does the text go on after "{x}"?', ""),
    ('Complete the sentence: "{x} ..."', ""),
    ('What follows the words "{x}"?', ""),
)


def quotations(rng: random.Random, characters: int) -> Document:
    """Sentences of the standard library, asked by their beginnings."""
    found = Document()
    for told in rng.sample(summaries(), len(summaries())):
        if _long(found, characters):
            break
        words = told.split()
        if len(words) < 9 or '"' in told:
            continue
        found.add(f"{told}.", ask(rng, GOES_ON, " ".join(words[4:12]), x=" ".join(words[:4])))
    return found


KINDS: tuple[Make, ...] = (
    parameters, table, source, dialogue, signatures, records, minutes, parameters, instructions,
    letters, quotations, records,
)  # fmt: skip
"""Kinds of documents. The two that differ most in form come twice."""


def document(rng: random.Random, index: int, characters: int) -> Document:
    """A document of one kind, or of two or three one after another.

    Args:
        rng: Draws everything.
        index: Documents of a row have all kinds.
        characters: Length at least.

    """
    first = KINDS[index % len(KINDS)]
    if rng.random() < 0.5:
        return first(rng, characters)
    makes = [first, *rng.sample(KINDS, rng.choice((1, 2)))]
    parts = [make(rng, characters // len(makes)) for make in makes]
    rng.shuffle(parts)
    lines = [line for part in parts for line in (*part.lines, "")]
    return Document(lines, [one for part in parts for one in part.asked])
