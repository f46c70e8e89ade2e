"""In how many KV heads a piece of the prompt survived."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_kvevict.calibrate.read_prompt import Prompt
from vllm_kvevict.tools.inspect.kept import Snapshot


@dataclass(frozen=True)
class Sighting:
    """One occurrence of a text: tokens [start, stop), and how many of them each head holds.

    ``held`` has an array [H] for every layer; ``cached`` says whether all its tokens had been
    computed when the snapshot was taken.
    """

    text: str
    start: int
    stop: int
    held: tuple[NDArray[np.int64], ...]
    cached: bool

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> NDArray[np.int64]:
        """[L]: heads that hold every token of it."""
        return np.array([(held == self.length).sum() for held in self.held])

    @property
    def some(self) -> NDArray[np.int64]:
        """[L]: heads that hold at least one token of it."""
        return np.array([(held > 0).sum() for held in self.held])

    @property
    def share(self) -> NDArray[np.float64]:
        """[L]: mean share of its tokens that a head holds."""
        return np.array([held.mean() / self.length for held in self.held])


def look_for(texts: Iterable[str], prompt: Prompt, snapshot: Snapshot) -> list[Sighting]:
    """Every occurrence of each text, in the order of ``texts`` and of the prompt.

    Raises:
        ValueError: The prompt does not contain a text.

    """
    places = [(text, place) for text in texts for place in prompt.find(text)]
    return [
        Sighting(
            text,
            place.start,
            place.stop,
            tuple(
                layer.mask(snapshot.num_tokens)[:, place.start : place.stop].sum(1)
                for layer in snapshot.layers
            ),
            place.stop <= snapshot.num_tokens,
        )
        for text, place in places
    ]
