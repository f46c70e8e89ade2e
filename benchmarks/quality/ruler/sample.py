"""A RULER sample: context, question, the beginning of the answer, and what must follow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RulerSample:
    """The columns of kvpress's RULER evaluation; ``prefix`` is its ``answer_prefix``.

    The prompt is one user message, ``context``, a line break and ``question``; the model's answer
    then begins with ``prefix``. ``any_answer`` is RULER's ``string_match_part``: one suffices.
    """

    task: str
    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    max_tokens: int
    any_answer: bool = False

    def score(self, text: str) -> float:
        """Share of the answers that occur in ``text``, in [0, 1]; RULER ignores case."""
        found = [answer.lower() in text.lower() for answer in self.answers]
        return float(any(found)) if self.any_answer else sum(found) / len(found)
