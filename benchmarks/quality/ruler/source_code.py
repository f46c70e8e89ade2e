"""Code that every installation of PyTorch has: the algorithms of NetworkX."""

import random
from functools import lru_cache
from pathlib import Path

LEAST = 12_000
"""Characters of the shortest file that is used."""


@lru_cache(maxsize=1)
def files() -> tuple[str, ...]:
    """Texts of source files, in the order of their paths; tests are left out."""
    import networkx

    root = Path(networkx.__file__).parent / "algorithms"
    paths = sorted(path for path in root.rglob("*.py") if "tests" not in path.parts)
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return tuple(text for text in texts if len(text) >= LEAST)


def piece(rng: random.Random, characters: int) -> str:
    """Return a part of one file that begins at a line, at least ``characters`` long.

    Raises:
        ValueError: No file is that long.

    """
    long = [text for text in files() if len(text) > characters]
    if not long:
        raise ValueError(f"no source file has {characters} characters")
    text = rng.choice(long)
    begin = rng.randrange(len(text) - characters)
    return text[text.rfind("\n", 0, begin) + 1 :]
