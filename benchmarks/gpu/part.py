"""One part's result file, written row by row: a part that was cut off goes on where it stopped."""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import describe
from benchmarks.provenance import UNKNOWN, provenance

Key = dict[str, Any]
WHERE = ("output", "scratch", "start", "until", "together")
"""Settings that do not change what a part measures: paths, times, and how many servers start at
once."""
MOST_ERROR = 3000
"""Characters of an error, from its end."""


class Part:
    """Rows of a part, and what they were measured with.

    Rows of an earlier run are kept if GPU, versions, commit and settings are the same. A file of
    others is renamed, never written over, and found again when they come back.

    Args:
        name: Of the part.
        args: Its settings, with ``output``, the file, and ``until``, seconds since the epoch at
            which the part must have ended, 0 for never.
        device: Where it runs.
        choice: Names of settings that only choose among rows.

    """

    def __init__(
        self, name: str, args: argparse.Namespace, device: torch.device, choice: Iterable[str] = ()
    ) -> None:
        self.path: Path = args.output
        self.until: float = args.until
        self.left: list[str] = []
        settings = {key: str(value) for key, value in vars(args).items()}
        chosen = {key: settings.pop(key) for key in choice}
        for key in WHERE:
            settings.pop(key, None)
        self._content: dict[str, Any] = {
            "part": name, "device": describe(device), "settings": settings, "choice": chosen,
            "rows": [], "provenance": provenance(),
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._adopt()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._content["rows"]

    def _adopt(self) -> None:
        """Take the rows of an earlier file of ours, and move another's out of the way."""
        stem, suffix = self.path.stem, self.path.suffix
        paths = [self.path, *sorted(self.path.parent.glob(f"{stem}-*{suffix}"))]
        mine = next((path for path in paths if path.exists() and self._same(path)), None)
        if self.path.exists() and mine != self.path:
            others = (self.path.with_name(f"{stem}-{n}{suffix}") for n in range(1, 10**6))
            aside = next(path for path in others if not path.exists())
            self.path.rename(aside)
            print(f"{self.path}: of other settings, another GPU or commit; now {aside.name}")
        if mine is not None:
            self._content["rows"] = json.loads(mine.read_text())["rows"]
            mine.rename(self.path)
            print(f"{self.path}: {len(self.rows)} rows of an earlier run")

    def _same(self, path: Path) -> bool:
        earlier, mine = json.loads(path.read_text()), self._content
        known, own = earlier.get("provenance", {}), mine["provenance"]
        alike = all(mine[key] == earlier.get(key) for key in ("part", "device", "settings"))
        traced = own["commit"] != UNKNOWN
        return (
            alike and traced and all(own[key] == known.get(key) for key in ("versions", "commit"))
        )

    def _row(self, key: Key) -> dict[str, Any] | None:
        found = (row for row in self.rows if all(row.get(k) == v for k, v in key.items()))
        return next(found, None)

    def has(self, key: Key) -> bool:
        """Whether the row with these values was measured."""
        row = self._row(key)
        return row is not None and "error" not in row

    def due(self, keys: Iterable[Key]) -> list[Key]:
        """Rows that are not measured yet; those that failed are last."""
        missing = [key for key in keys if not self.has(key)]
        return sorted(missing, key=lambda key: self.failed([key]))

    def failed(self, keys: Iterable[Key]) -> bool:
        """Whether the row of any key is an error."""
        return any("error" in (self._row(key) or {}) for key in keys)

    def fits(self, seconds: float, *keys: Key) -> bool:
        """Whether so much time is left; else the rows are said to be not measured."""
        left = self.until - time.time()
        if not self.until or seconds <= left:
            return True
        for key in keys:
            self.left.append(" ".join(map(str, key.values())))
            print(f"not measured: {key}: about {seconds:.0f} s needed, {max(0, left):.0f} left")
        return False

    def measure(
        self, keys: Iterable[Key], seconds: Callable[[Key], float], run: Callable[[Key], Key]
    ) -> None:
        """Add what ``run`` gives for each row that is due and fits into the time that is left."""
        for key in self.due(keys):
            if self.fits(seconds(key), key):
                self.attempt(key, lambda key=key: run(key))  # type: ignore[misc]

    def attempt(self, key: Key, run: Callable[[], Key]) -> None:
        """Add a row, or its error, which another run tries again."""
        started = time.monotonic()
        try:
            self.add(key, run() | {"seconds": round(time.monotonic() - started, 1)})
        except Exception as error:
            self.fail(key, error)

    def fail(self, key: Key, error: Exception) -> None:
        """Enter an error in the place of a row."""
        traceback.print_exception(error)
        self.add(key, {"error": f"{type(error).__name__}: {error}"[-MOST_ERROR:]})

    def add(self, key: Key, figures: dict[str, Any]) -> None:
        """Enter a row in the place of an earlier one of its key, and write the file."""
        earlier = self._row(key)
        if earlier is not None:
            self.rows.remove(earlier)
        self.rows.append(key | figures)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1) + "\n")
        new.replace(self.path)

    def outcome(self) -> str | None:
        """What is missing, as a message to exit with; None where nothing is."""
        failed = sum("error" in row for row in self.rows)
        if not (failed or self.left):
            return None
        return f"{self.path.stem}: {failed} rows failed, {len(self.left)} did not fit; run it again"


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """The options of every part."""
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--until", type=float, default=0, help="seconds since the epoch; 0: never")
