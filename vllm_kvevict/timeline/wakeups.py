"""Which requests to look at in a step."""

from typing import Generic, TypeVar

Item = TypeVar("Item")


class WakeupQueue(Generic[Item]):
    """Decoding requests by the step that looks at them next: most need nothing for many steps.

    Args:
        tokens_a_step: Most tokens that a decoding request computes in a step.

    """

    def __init__(self, tokens_a_step: int = 1) -> None:
        self._tokens_a_step = tokens_a_step
        self._step = 0
        self._asleep: dict[int, dict[Item, None]] = {}
        self._wakes_at: dict[Item, int] = {}

    def sleep(self, item: Item, tokens: int) -> None:
        """Look at a request again in the step before which it may have computed ``tokens`` more.

        In the next step at the earliest. A request that sleeps already sleeps until the new step.
        """
        self.forget(item)
        step = self._step + max(1, -(-tokens // self._tokens_a_step))
        self._asleep.setdefault(step, {})[item] = None
        self._wakes_at[item] = step

    def forget(self, item: Item) -> None:
        """Never look at a request again, if it sleeps."""
        step = self._wakes_at.pop(item, None)
        if step is not None:
            del self._asleep[step][item]
            if not self._asleep[step]:
                del self._asleep[step]

    def next_step(self) -> list[Item]:
        """Begin a step; returns the requests to look at in it."""
        self._step += 1
        woken = list(self._asleep.pop(self._step, ()))
        for item in woken:
            del self._wakes_at[item]
        return woken
