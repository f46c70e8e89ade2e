"""Random days in rounds, each from a seed of its own, until what must occur has occurred.

A change of a strategy draws other days, so no single seed promises that a rare case occurs.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from tests.engine.scenarios import SCENARIOS, Scenario

ROUNDS = 20

HUNTS = 40
"""Rounds of a hunt, each of which ends with the first complaint."""

SEED = os.environ.get("KVEVICT_SEED")
"""First seed of every test; ``make fuzz`` sets another each night."""


class Draws(HypothesisProvider):
    """Draws the same from one seed in every process.

    By default hypothesis also draws constants from the source of the modules that are loaded, so
    that a seed would mean other days in each worker, and after each change of a comment.
    """

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None


AVAILABLE_PROVIDERS["draws"] = Draws

PROFILE = settings(
    backend="draws",
    deadline=None,
    database=None,
    # Shrinking takes minutes: KVEVICT_SHRINK=1 asks for it.
    phases=[Phase.generate] + ([Phase.shrink] if os.environ.get("KVEVICT_SHRINK") else []),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def play(day: Callable[[Scenario], None], examples: int, number: int = 0) -> None:
    """One round; its seed is printed, and finds a failure again."""
    first = int(SEED or 0) + number
    print(f"KVEVICT_SEED={first}")
    seed(first)(settings(PROFILE, max_examples=examples)(given(SCENARIOS)(day)))()


def play_until_seen(
    day: Callable[[Scenario], None], examples: int, totals: Counter[str], names: Sequence[str]
) -> None:
    """Rounds until every name was counted; an assertion names those that never were."""
    for number in range(ROUNDS):
        play(day, examples if number == 0 else max(12, examples // 4), number)
        missing = [name for name in names if not totals[name]]
        if not missing:
            break
    print(" ".join(f"{name}={value}" for name, value in totals.items()))
    assert not missing, f"the load never saw any of {', '.join(missing)}"


def hunt(day: Callable[[Scenario], None], message: str, examples: int = 300) -> bool:
    """Rounds until a day ends with the message; False where none of :data:`HUNTS` rounds does."""
    for number in range(HUNTS):
        try:
            play(day, examples, number)
        except (AssertionError, ValueError) as error:
            if re.search(message, str(error)):
                return True
    return False
