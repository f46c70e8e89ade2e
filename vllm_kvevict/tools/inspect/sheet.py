"""A figure laid out in inches, and what its panels share."""

from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from vllm_kvevict.tools.inspect.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 13.0
MARGIN = 0.85
LINE = 0.19
MAX_SIGHTINGS = 8
FIND_COLOURS = ("#d62728", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")
SPAN_COLOUR = "#1a7f37"


class Sheet:
    """A figure of ``WIDTH`` inches with parts below one another.

    Args:
        heights: Height of each part in inches, from the top down.

    """

    def __init__(self, heights: dict[str, float]) -> None:
        self.height = sum(heights.values())
        self.figure = plt.figure(figsize=(WIDTH, self.height), dpi=130)
        self.tops: dict[str, float] = {}
        top = self.height
        for name, height in heights.items():
            self.tops[name] = top
            top -= height

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Axes placed in inches: left edge, top edge above the figure's bottom, size."""
        bottom = top - height
        return self.figure.add_axes(
            (left / WIDTH, bottom / self.height, width / WIDTH, height / self.height)
        )

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Text with its left and top edge in inches; ``$`` is a dollar sign."""
        self.figure.text(left / WIDTH, top / self.height, text, va="top", parse_math=False, **style)


def label_layers(axes: "Axes", view: View) -> None:
    """Name the rows of ``axes`` after the model's layers."""
    indices = [layer.index for layer in view.snapshot.layers]
    step = max(1, -(-len(indices) // 16))
    axes.set_yticks(range(0, len(indices), step), [str(i) for i in indices[::step]])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("layer", fontsize=9)


def letter(index: int) -> str:
    """How the picture calls a looked-for text."""
    return chr(ord("A") + index)


def find_colour(index: int) -> str:
    """Colour of a looked-for text."""
    return FIND_COLOURS[index % len(FIND_COLOURS)]
