"""How large the fault tests are: small in CI, full with ``KVEVICT_FAULTS=full``."""

import os

import pytest

FULL = os.environ.get("KVEVICT_FAULTS") == "full"


def size(small: int, full: int) -> int:
    """``full`` where the environment asks for it, else ``small``."""
    return full if FULL else small


UNPROVEN = pytest.mark.skipif(
    "KVEVICT_FAULTS" not in os.environ,
    reason="has not passed on a quiet machine yet; KVEVICT_FAULTS=small or full runs it",
)
