"""One part's result file, written row by row: a part that was cut off goes on where it stopped."""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import describe
from benchmarks.provenance import provenance


class Part:
    """Rows of a part, and what they were measured with.

    Rows of an earlier run are kept if settings, device, versions and commit are the same.

    Args:
        name: Of the part.
        args: Its settings, with ``output``, the file.
        device: Where it runs.
        facts: What is measured once, beside the rows.

    """

    def __init__(
        self, name: str, args: argparse.Namespace, device: Any, **facts: dict[str, Any]
    ) -> None:
        self.path: Path = args.output
        settings = {key: str(value) for key, value in vars(args).items()}
        self._content: dict[str, Any] = {
            "part": name, "device": describe(device), "settings": settings, **facts, "rows": [],
            "provenance": provenance(),
        }  # fmt: skip
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            if self._same(earlier):
                self._content["rows"] = earlier["rows"]
                print(f"{self.path}: {len(earlier['rows'])} rows of an earlier run")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _same(self, earlier: dict[str, Any]) -> bool:
        mine = self._content
        known = earlier.get("provenance", {})
        alike = all(mine[key] == earlier.get(key) for key in ("device", "settings"))
        names = ("versions", "commit", "machine")
        return alike and all(mine["provenance"][name] == known.get(name) for name in names)

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values."""
        return any(
            all(row.get(name) == value for name, value in key.items())
            for row in self._content["rows"]
        )

    def add(self, row: dict[str, Any]) -> None:
        """Enter a row, and write the file."""
        self._content["rows"].append(row)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1) + "\n")
        new.replace(self.path)
