"""The numbers in the tables of README and docs/results.md are those of the files they come from."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
QUALITY = ROOT / "docs" / "quality.md"
Row = dict[str, str]
KNOWN, UNKNOWN = "Question-aware", "Question-agnostic"
RATIO = "of stock's"
PROBE, FULL = "probe, layers", "full cache"
SMOLLM2, GEMMA, INT4 = "answers.md", "gemma_answers.md", "answers_int4.md"


def tables(text: str) -> Iterator[list[Row]]:
    """Tables of a page in Markdown: cells by the title of their column, without emphasis."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            [re.sub(r"\*\*", "", cell).strip() for cell in line.strip("|").split(" |")]
            for line in block.splitlines()
        ]
        titles, _, *rows = lines
        yield [dict(zip(titles, row, strict=True)) for row in rows]


def table(page: Path, *titles: str) -> list[Row]:
    """The only table of a page whose columns begin with these titles."""
    found = [one for one in tables(page.read_text()) if tuple(one[0])[: len(titles)] == titles]
    assert len(found) == 1, titles
    return found[0]


def cell(file: str, scenario: str, task: str, policy: str, budget: str) -> str:
    """A score of a file of ``benchmarks.quality`` with its interval, in whole percent."""
    section = (RESULTS / file).read_text().split(f"## {scenario}\n")[1].split("\n## ")[0]
    named = ""
    for row in next(tables(section)):
        named = row["task"] or named
        if (named, row["policy"]) == (task, policy):
            return rounded(row[budget].partition(";")[0])
    raise KeyError((file, scenario, task, policy))


def rounded(text: str) -> str:
    """A text with its numbers in whole units."""
    return re.sub(r"\d+\.\d+", lambda one: f"{float(one[0]):.0f}", text)


def answers(file: str, scenario: str, task: str, policy: str, budget: str) -> str:
    """A score of a file of ``benchmarks.quality``, in whole percent."""
    return cell(file, scenario, task, policy, budget).split()[0]


def with_a_profile() -> list[list[str]]:
    """README's second table: question known and not known."""
    budgets = "25%", "12.5%", "6.25%"
    return [
        [answers(SMOLLM2, scenario, task, FULL, "12.5%")]
        + [answers(SMOLLM2, scenario, task, PROBE, budget) for budget in budgets]
        for task in ("later", "defaults")
        for scenario in (KNOWN, UNKNOWN)
    ]


def with_intervals(file: str) -> Callable[[], list[list[str]]]:
    """A model's table of docs/quality.md."""

    def rows() -> list[list[str]]:
        budgets = "6.25%", "12.5%", "25%"
        return [
            [cell(file, UNKNOWN, task, "full cache", "25%")]
            + [cell(file, one, task, PROBE, b) for one in (KNOWN, UNKNOWN) for b in budgets]
            for task in ("later", "s-niah", "unseen", "defaults")
        ]

    return rows


def without_a_profile() -> list[list[str]]:
    """Policies without a profile of docs/quality.md."""
    file = "answers_others.md"
    return [
        [cell(file, UNKNOWN, task, FULL, "25%")]
        + [cell(file, one, task, policy, b) for one in (KNOWN, UNKNOWN) for b in ("12.5%", "25%")]
        for task in ("later", "defaults")
        for policy in ("ada-defensive", "streaming-llm")
    ]


def questions_in_turn() -> list[list[str]]:
    """Right answers to five questions about one context, and points lost, of docs/quality.md."""

    def rows(file: str) -> dict[str, Row]:
        (found,) = tables((RESULTS / f"{file}.md").read_text())
        return {row["budget"]: row for row in found}

    def lost(row: Row, interval: bool = True) -> str:
        mean, low, high = (-float(one) for one in re.findall(r"[-+][\d.]+", row["difference"]))
        return f"{mean + 0:.1f}" + (f" [{high + 0:.1f}, {low + 0:.1f}]" if interval else "")

    def cells(model: str, budget: str) -> list[str]:
        four = rows(f"{model}turns_int4")[budget]
        right = four["all"].split()[0]
        if budget == "-":
            return [right, "", ""]
        return [right, lost(four), lost(rows(f"{model}turns")[budget], interval=False)]

    return [cells("", one) + cells("gemma_", one) for one in ("-", "25%", "12.5%", "6.25%")]


def side_by_side() -> list[list[str]]:
    """Caches of docs/quality.md: two tasks, question not known."""
    (simulated,) = tables((RESULTS / "vllm_caches.md").read_text())

    def two(files: tuple[str, str], policy: str, budget: str) -> list[str]:
        tasks = "defaults", "later"
        return [
            cell(file, UNKNOWN, task, policy, budget)
            for file, task in zip(files, tasks, strict=True)
        ]

    def of_vllm(name: str) -> list[str]:
        mine = {row["task"]: row for row in simulated if row["cache"] == name}
        memory = rounded(mine["later"]["memory"])
        return [memory, rounded(mine["defaults"]["right, %"]), rounded(mine["later"]["right, %"])]

    four, fp8, both = (INT4, INT4), "fp8.md", "fp8_int4.md"
    older = SMOLLM2, SMOLLM2
    return [
        ["100%", *two(four, "full cache", "12.5%")],
        ["50%", *two((fp8, fp8), "full cache", "50%")],
        of_vllm("turboquant_4bit_nc"),
        of_vllm("int4_per_token_head"),
        ["25%", *two((fp8, fp8), PROBE, "50%")],
        ["25%", *two(older, PROBE, "25%")],
        ["25%", *two(four, PROBE, "25%")],
        ["12.5%", *two(older, PROBE, "12.5%")],
        ["12.5%", *two(four, PROBE, "12.5%")],
        ["6.25%", *two(four, PROBE, "6.25%")],
        ["12.5%", *two((both, both), PROBE, "25%")],
        ["6.25%", *two((both, both), PROBE, "12.5%")],
    ]


def load() -> list[list[str]]:
    """README's first table: some rows and columns of alternatives.md."""
    found = {row[""]: row for row in table(RESULTS / "alternatives.md", "", "kept")}
    shown = [found[row["server"]] for row in table(README, "server", "kept")]
    return [
        [row["kept"], *(value for title, value in list(row.items())[3:] if "p99" not in title)]
        for row in shown
    ]


def under_load() -> list[list[str]]:
    """Output tokens/s of docs/results.md."""
    found = next(tables((RESULTS / "pressure_needle.md").read_text()))
    return [
        [row["output tokens/s"] for row in found if row["way"] == way]
        for way in ("stock", "always", "pressure")
    ]


def chats() -> list[list[str]]:
    """Two turns of docs/results.md, which shows ratios but in the row of stock vLLM."""

    def of(file: str, server: str) -> tuple[Row, Row]:
        turns, totals = tables((RESULTS / file).read_text())
        (turn,) = (row for row in turns if (row["server"], row["turn"]) == (server, "2"))
        (total,) = (row for row in totals if row["server"] == server)
        return turn, total

    def row(server: str, rounds: str = "", restarted: str = "") -> list[str]:
        turn, total = of("chat.md", server)
        right = turn["right answers"].split()[0]
        ttft, wall = turn[RATIO], total[RATIO]
        if server == "stock":
            ttft = f"{float(turn['TTFT, median, s']):.1f} s"
            wall = f"{float(total['wall, s']):.0f} s"
        later = ""
        if rounds:
            other, _ = of("chat_rounds.md", rounds)
            later = other[RATIO]
            if server == "stock":
                later = f"{float(other['TTFT, median, s']):.1f} s"
        if restarted:
            other, _ = of("chat_rounds.md", restarted)
            later += f"; {other[RATIO]}"
            right += f"; {other['right answers'].split()[0]}"
        return [right, ttft, later, turn["computed"], wall]

    files = "tiers, from files"
    return [
        row("stock", "stock"), row("always"), row("pressure"),
        row("at the document", "at the document"), row("tiers", "tiers"),
        row(files, files, f"{files}, restarted"),
    ]  # fmt: skip


def growing() -> list[list[str]]:
    """Some turns of docs/results.md, of conversations that grow."""
    turns, _ = tables((RESULTS / "chat_every.md").read_text())
    of = {(row["server"], row["turn"]): row for row in turns}

    def row(turn: str) -> list[str]:
        stock, tiers = of["stock", turn], of["every N tokens, tiers", turn]
        files = of["every N tokens, from files, restarted", turn]
        return [
            f"{float(stock['TTFT, median, s']):.1f} s", tiers[RATIO], files[RATIO],
            stock["of the new"], tiers["of the new"],
            stock["right answers"], tiers["right answers"],
        ]  # fmt: skip

    return [row(turn) for turn in ("2", "4", "6", "8", "3 on")]


EVERY = "every N tokens"
OTHER_INT8 = "conversations_int8_4000.md"


def by_turn(file: str, server: str, title: str = "right answers") -> list[str]:
    """A column of turns 2 to 4 of 100 conversations each, and its sum."""
    turns, _ = tables((RESULTS / file).read_text())
    of = {one["turn"]: one[title] for one in turns if one["server"] == server}
    counts = [of[turn].split()[0] for turn in ("2", "3", "4")]
    return [*counts, str(sum(map(int, counts)))]


def conversations() -> list[list[str]]:
    """Right answers of docs/quality.md, by turn and of all turns together."""
    columns = [
        by_turn(f"{file}.md", server)
        for file, server in (
            ("conversations", "stock"),
            ("conversations", EVERY),
            ("conversations_int8", EVERY),
            ("gemma_conversations", "stock"),
            ("gemma_conversations", EVERY),
            ("gemma_conversations_int8", EVERY),
        )
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def other_conversations() -> list[list[str]]:
    """The same of 100 other conversations of SmolLM2."""
    columns = by_turn("conversations_4000.md", "stock"), by_turn(OTHER_INT8, EVERY)
    return [list(row) for row in zip(*columns, strict=True)]


def alternatives() -> list[list[str]]:
    """The rows of docs/results.md, which shows the whole table."""
    found = table(RESULTS / "alternatives.md", "", "kept")
    return [list(row.values())[1:] for row in found]


def on_a_gpu() -> list[list[str]]:
    """Serving on an H100; the page leaves out most ratios."""
    found = table(RESULTS / "gpu_h100.md", "", "output tokens/s", "most at once")
    shown = table(PAGE, "", "output tokens/s", "most at once")
    assert [row[""] for row in found] == [row[""] for row in shown]
    return [
        [row[title] if title == "output tokens/s" else row[title].split(" (")[0]
         for title in shown[0] if title]
        for row in found
    ]  # fmt: skip


SHOWN: list[tuple[Path, tuple[str, ...], int, Callable[[], list[list[str]]]]] = [
    (README, ("SmolLM2, task", "question"), 2, with_a_profile),
    (README, ("server", "kept"), 1, load),
    (PAGE, ("", "kept"), 1, alternatives),
    (PAGE, ("memory for",), 1, under_load),
    (PAGE, ("", "right"), 1, chats),
    (PAGE, ("turn",), 1, growing),
    (QUALITY, ("SmolLM2, `probe`", "full cache"), 1, with_intervals(SMOLLM2)),
    (QUALITY, ("Gemma, `probe`", "full cache"), 1, with_intervals(GEMMA)),
    (QUALITY, ("SmolLM2, `int4`", "full cache"), 1, with_intervals(INT4)),
    (QUALITY, ("SmolLM2, no profile", "full cache"), 1, without_a_profile),
    (QUALITY, ("turn", "SmolLM2, full cache"), 1, conversations),
    (QUALITY, ("turn", "full cache, others"), 1, other_conversations),
    (QUALITY, ("cache", "memory"), 1, side_by_side),
    (QUALITY, ("memory", "SmolLM2, `int4`"), 1, questions_in_turn),
    (PAGE, ("", "output tokens/s"), 1, on_a_gpu),
]
"""Page, first titles of a table, columns that name its rows, and what its other cells must be."""

OTHERS = {"file", "row"}
"""First titles of tables without results. A table without titles has none, either."""


@pytest.mark.parametrize("shown", SHOWN, ids=lambda one: one[-1].__name__)
def test_cells_are_those_of_the_files(shown: Any) -> None:
    page, titles, names, expected = shown
    rows = [list(row.values())[names:] for row in table(page, *titles)]
    assert rows == expected()


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.stem)
def test_every_table_of_results_is_compared(page: Path) -> None:
    compared = [titles for one, titles, *_ in SHOWN if one == page]
    for one in tables(page.read_text()):
        first = tuple(one[0])
        ours = [titles for titles in compared if first[: len(titles)] == titles]
        assert len(ours) == 1 or first[0] in OTHERS or not any(first), first


def test_idle_stores_cost_what_the_page_says() -> None:
    """Median, least and most of the ratios of four pairs, to the digits that the page shows."""
    found = json.loads((RESULTS / "serving_idle_tiers.json").read_text())["results"]
    ratios = found["idle_tiers"]["ratio_eviction_to_stock"]
    wanted = [
        value
        for name in ("output_tokens_per_s", "ttft_ms_median")
        for value in (ratios[name]["median"], min(ratios[name]["runs"]), max(ratios[name]["runs"]))
    ]
    (shown,) = re.findall(
        r"are ([\d.]+)x of the output tokens/s \(([\d.]+)x to ([\d.]+)x\) and ([\d.]+)x of the "
        r"median time to first token \(([\d.]+)x to ([\d.]+)x;",
        " ".join(PAGE.read_text().split()),
    )
    digits = [len(text.partition(".")[2]) for text in shown]
    assert list(shown) == [f"{value:.{n}f}" for value, n in zip(wanted, digits, strict=True)]


def test_conversations_take_what_the_first_page_says() -> None:
    """TTFT in the first turn and from turn 3 on, with stores in memory."""
    turns, _ = tables((RESULTS / "chat_every.md").read_text())
    ratio = {row["turn"]: row[RATIO] for row in turns if row["server"] == f"{EVERY}, tiers"}
    (said,) = re.findall(r"its median TTFT is (.*?);", README.read_text(), re.DOTALL)
    assert re.findall(r"[\d.]+x", said) == [ratio["1"], ratio["3 on"]]


SOURCES = {"server": "alternatives.md", "SmolLM2, task": "answers.md"}
"""The one file from which a table of README comes, by its first title."""

ORIGIN = {
    "commit": r"commit ([0-9a-f]{7,40})\b",
    "machine": r"\. ([^.]*?\d+ cores, \d+ GiB[^.]*)\. vllm",
    "profile": r"Profile \S+ \(SHA-256 ([0-9a-f]{64})\)",
}
"""What neighbours in a table have in common, as the first paragraph of a result file states it."""


def origin(file: str) -> dict[str, set[str]]:
    """Each field's values in a result file, with the type in which it was computed."""
    text = (RESULTS / file).read_text()
    found = {name: set(re.findall(pattern, text)) for name, pattern in ORIGIN.items()}
    typed = re.findall(r"--dtype (\w+)", text) or re.findall(r"tokens in (float32|bfloat16)", text)
    return found | {"type": set(typed)}


def test_neighbours_in_a_table_of_the_first_page_are_of_one_run() -> None:
    """One commit, one machine, one profile and one type for each table, and one for both but for
    the commit, because the page names one model, profile and type for both."""
    shown = list(tables(README.read_text()))
    assert [next(iter(one[0])) for one in shown] == list(SOURCES)
    found = [origin(file) for file in SOURCES.values()]
    for one in found:
        assert {name: len(values) for name, values in one.items()} == dict.fromkeys(one, 1), one
    first, second = ({**one, "commit": set()} for one in found)
    assert first == second
    assert f"in {next(iter(first['type']))} on" in README.read_text()
    cores = re.findall(r"(\d+) cores", next(iter(first["machine"])))
    assert cores == ["2"] and "on two CPU cores" in README.read_text()


def test_wrong_answers_are_as_many_as_the_page_says() -> None:
    page, file = " ".join(QUALITY.read_text().split()), "gemma_conversations.md"
    ((wrong, mistaken),) = re.findall(r"of Gemma's (\d+) wrong answers (\d+) name another", page)
    assert int(wrong) == 300 - int(by_turn(file, EVERY)[-1])
    assert mistaken == by_turn(file, EVERY, "mistaken")[-1]
    (seldom,) = re.findall(r"128 tokens\]\S+ Gemma answers (\d+) of 300", page)
    assert seldom == by_turn("gemma_conversations_128.md", EVERY)[-1]


def test_right_answers_in_few_bits_are_those_of_the_files() -> None:
    """The table is in docs/quality.md. Its cells also state the share of kept tokens."""
    kinds = {"real doc": "defaults", "needle": "s-niah", "in prose": "later", "facts]": "unseen"}
    title = ""
    for row in table(QUALITY, "model, task", "memory"):
        title = row["model, task"] or title
        (task,) = (kind for text, kind in kinds.items() if text in title)
        (four,) = re.findall(r"(\w+\.md)\)", title)
        memory = row["memory"]
        policy, budget = (FULL, "12.5%") if memory == FULL else (PROBE, memory)
        shown = [text.partition("]")[0] + "]" for text in list(row.values())[2:]]
        wanted = [cell(file, UNKNOWN, task, policy, budget) for file in (GEMMA, four)]
        assert shown == wanted, (title, memory)
