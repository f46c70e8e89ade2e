"""Cases that `make nightly` runs and `make test` leaves out: more of the same kind."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """One set of arguments of a parametrised test."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def some(cases: Iterable[str], *always: str) -> list[Any]:
    """All cases, of which `make test` runs ``always``.

    Raises:
        ValueError: One of them is no case.

    """
    names = list(cases)
    if unknown := set(always) - set(names):
        raise ValueError(f"no case: {', '.join(sorted(unknown))}")
    return [name if name in always else nightly(name) for name in names]
