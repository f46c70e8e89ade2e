"""The requests that a step has to examine."""

from typing import Generic, TypeVar

Item = TypeVar("Item")


class WakeupQueue(Generic[Item]):
    """Decoding requests by the next step that examines them. Most need nothing for many steps.

    Args:
        tokens_a_step: Maximum number of tokens that a decoding request computes per step.

    """

    def __init__(self, tokens_a_step: int = 1) -> None:
        self._tokens_a_step = tokens_a_step
        self._step = 0
        self._asleep: dict[int, dict[Item, None]] = {}
        self._wakes_at: dict[Item, int] = {}

    def sleep(self, item: Item, tokens: int) -> None:
        """Examine a request again in the step before which it may have computed ``tokens`` more.

        This is the next step at the earliest. It replaces an earlier wake-up of the request.
        """
        self.cancel(item)
        step = self._step + max(1, -(-tokens // self._tokens_a_step))
        self._asleep.setdefault(step, {})[item] = None
        self._wakes_at[item] = step

    def cancel(self, item: Item) -> None:
        """Cancel the wake-up of a request, if it has one."""
        step = self._wakes_at.pop(item, None)
        if step is not None:
            del self._asleep[step][item]
            if not self._asleep[step]:
                del self._asleep[step]

    def next_step(self) -> list[Item]:
        """Begin a step; return the requests to examine in it."""
        self._step += 1
        woken = list(self._asleep.pop(self._step, ()))
        for item in woken:
            del self._wakes_at[item]
        return woken
