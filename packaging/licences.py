"""Prints name, version and licence of everything in a CycloneDX file: ``licences.py FILE``.

Ends with an error where a component names no licence.
"""

import json
import sys
from pathlib import Path
from typing import Any


def licences(component: dict[str, Any]) -> list[str]:
    """Names and expressions that a component gives."""
    found = []
    for entry in component.get("licenses", []):
        named = entry.get("license", {})
        found.append(entry.get("expression") or named.get("id") or named.get("name", ""))
    return [name for name in found if name]


def main(file: Path) -> None:
    components = json.loads(file.read_text())["components"]
    rows = [(one["name"], one.get("version", ""), licences(one)) for one in components]
    for name, version, names in sorted(rows):
        print(f"{name:24} {version:12} {', '.join(names) or 'NO LICENCE'}")
    missing = [name for name, _, names in rows if not names]
    if missing:
        raise SystemExit(f"no licence: {', '.join(missing)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
