"""The part of docs/compatibility.md that the table is the source of."""

from dev.features.table import Entry

BEGIN = "<!-- Written by `python -m dev.features --write` from dev/features/table.toml. -->"
END = "<!-- End of what it writes. -->"

KINDS = {
    "config": "configuration",
    "worker": "workers",
    "core": "engine cores",
    "client": "clients",
    "route": "routes",
    "request": "requests",
}
WORDS = {"works": "works", "refused": "refused", "no_effect": "no effect", "unknown": "unknown"}


def rows(table: list[Entry]) -> str:
    """Return a row for each subject: where vLLM has it, its state, and the test or the reason."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for one in table:
        reason = f"`{one.reason}`" if one.state == "works" else one.reason.strip(" ;.")
        place = KINDS[one.kind] + (f" of vLLM {one.since}" if one.since else "")
        found = places.setdefault((one.what, one.state, reason), [])
        found += [place] if place not in found else []
    lines = [
        f"| {what} | {', '.join(where)} | {WORDS[state]} | {reason} |"
        for (what, state, reason), where in places.items()
    ]
    return (
        "\n".join(["| subject | part of vLLM | state | test, words of the sentence, or reason |"])
        + "\n| --- | --- | --- | --- |\n"
        + "\n".join(lines)
    )


def written(text: str, table: list[Entry]) -> str:
    """Return a page with its part replaced.

    Raises:
        ValueError: The page has no such part.

    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{rows(table)}\n\n{END}{after}"
