"""Cases that `make nightly` runs and `make test` leaves out: more of the same kind."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

PARAM = type(pytest.param())


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


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes, of which `make test` runs so many that no value is missing.

    As many run as the longest axis has values. In each of them every other axis takes the value
    that was taken least, and of these the one that met the others of the combination least.

    Args:
        axes: Values or ``pytest.param`` of one argument, or of several arguments at once. A value
            that is marked ``nightly`` is in no combination of `make test`.

    """
    given = [
        [one if isinstance(one, PARAM) else pytest.param(one) for one in axis] for axis in axes
    ]
    daily = [[one for one in axis if not _is_nightly(one)] for axis in given]
    longest = max(daily, key=len)
    met: Counter[Any] = Counter()
    chosen = set()
    for value in longest:
        row: list[Any] = [value]
        for axis in daily:
            if axis is not longest:
                row.append(
                    min(axis, key=lambda one: (met[id(one)], sum(met[id(one), id(p)] for p in row)))
                )
        for one in row:
            met.update([id(one), *((id(one), id(other)) for other in row)])
        chosen.add(frozenset(map(id, row)))
    found = []
    for parts in product(*given):
        marks = [mark for one in parts for mark in one.marks]
        if frozenset(map(id, parts)) not in chosen and not any(map(_is_nightly, parts)):
            marks.append(pytest.mark.nightly)
        names = [one.id if one.id is not None else "-".join(map(str, one.values)) for one in parts]
        values = [value for one in parts for value in one.values]
        found.append(pytest.param(*values, marks=marks, id="-".join(names)))
    return found


def _is_nightly(one: Any) -> bool:
    return any(mark.name == "nightly" for mark in one.marks)
