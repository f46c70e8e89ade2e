"""How large the fault tests are: small in CI, full with ``KVEVICT_FAULTS=full``."""

import os

FULL = os.environ.get("KVEVICT_FAULTS") == "full"


def size(small: int, full: int) -> int:
    """``full`` where the environment asks for it, else ``small``."""
    return full if FULL else small
