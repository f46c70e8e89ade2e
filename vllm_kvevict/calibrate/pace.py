"""Expected duration of a calibration, from the times of its first forward passes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.calibrate.lessons import Lesson
from vllm_kvevict.calibrate.rounds import FIRST

SCORED = 0.3
"""Time in which a context is scored and learned from, relative to its forward pass."""

TRAINED = 9.0
"""Time in which the networks are trained, relative to the forward pass of one context. Larger
models have fewer heads for their size and take less."""

OF_LESSON = 1.05
"""Time of a text whose attention is recorded, relative to its forward pass."""

CONTEXTS, TEXTS = 4.1, 15.0
"""Time in which a held-out context is judged, relative to its forward pass, and the time of its
texts relative to theirs: three contexts are run and each is scored several times; texts follow with
each budget, and with scores of two kinds."""


@dataclass
class Pace:
    """Seconds and tokens of forward passes over contexts, and over texts after them."""

    context_s: float = 0.0
    context_tokens: int = 0
    text_s: float = 0.0
    text_tokens: int = 0

    def hold(self, model: Any, context: Sequence[int]) -> None:
        """Let the model hold a context, and note the time."""
        began = time.perf_counter()
        model.hold(context)
        self.context_s += time.perf_counter() - began
        self.context_tokens += len(context)

    def lost(self, model: Any, text: Sequence[int], answer: int) -> Any:
        """Return ``model.lost`` of a text after the whole context, and note the time."""
        began = time.perf_counter()
        found = model.lost(text, answer, [])
        self.text_s += time.perf_counter() - began
        self.text_tokens += len(text)
        return found

    def parts(
        self,
        lessons: Sequence[Lesson],
        answers: Sequence[Lesson],
        held_out: Sequence[Lesson],
        networks: bool,
        cut_layers: int,
    ) -> dict[str, float]:
        """Return the expected seconds by the names of the progress bars.

        Args:
            lessons: From which probes are learned.
            answers: By which the budget is shared out.
            held_out: By which quality is measured.
            networks: Whether networks are trained.
            cut_layers: Layers whose effects on answers are measured; 0 if they are not.

        """

        def seconds(lesson: Lesson, contexts: float, texts: float) -> float:
            tokens = sum(len(later.ids) for later in lesson.later)
            return contexts * self._of_context(lesson) + texts * self._of_text() * tokens

        learned = (1 + SCORED, OF_LESSON)
        trained = self.training(lessons, networks)
        # Of a lesson's texts about two thirds are asked, in a row for each layer and two more.
        effects = (1, (cut_layers + 2) * 2 / 3) if cut_layers else (0, 0)
        return {
            "probes": sum(seconds(one, *learned) for one in lessons) + trained,
            "shares": sum(seconds(one, *learned) + seconds(one, *effects) for one in answers),
            "quality": sum(seconds(one, CONTEXTS, TEXTS) for one in held_out),
        }

    def training(self, lessons: Sequence[Lesson], networks: bool) -> float:
        """Return the expected seconds in which networks of these lessons are trained."""
        if not networks:
            return 0.0
        contexts = sum(map(self._of_context, lessons))
        # Many lessons take more steps, and are trained of after each doubling, too.
        checks = 2 if len(lessons) > FIRST else 1
        return checks * TRAINED * contexts / min(len(lessons), FIRST)

    def _of_context(self, lesson: Lesson) -> float:
        return self.context_s / max(1, self.context_tokens) * len(lesson.context)

    def _of_text(self) -> float:
        return self.text_s / max(1, self.text_tokens)


def sentence(parts: dict[str, float]) -> str:
    """Return the line that says what calibrate takes; start-up reads it."""
    each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    return f"calibrating takes about {sum(parts.values()):.0f} s: {each}"
