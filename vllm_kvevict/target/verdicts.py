"""What prompts came to, so that the same prompt is not tried again."""

from vllm_kvevict.target.ladder import Key

MOST = 1024
"""Verdicts that are remembered; those that were not asked for the longest go first."""


class Verdicts:
    """What was chosen, and the nats of every budget that was tried, by what they depend on."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[str, dict[str, float]]] = {}

    def get(self, key: Key) -> tuple[str, dict[str, float]] | None:
        """What a prompt came to; None where it is not known."""
        if (found := self._known.pop(key, None)) is not None:
            self._known[key] = found
        return found

    def put(self, key: Key, kept: str, nats: dict[str, float]) -> None:
        """Remember what a prompt came to."""
        self._known.pop(key, None)
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = kept, nats

    def clear(self) -> None:
        """Forget all: the model's weights may be others now."""
        self._known.clear()
