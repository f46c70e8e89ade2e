"""Questions about long English texts whose answers a reader can check."""

import random
from dataclasses import dataclass

from benchmarks.quality.ruler.prose import hide

FACTS = (
    ("Maria Delgado keeps the spare key to the greenhouse under the blue flower pot.",
     "Where does Maria Delgado keep the spare key to the greenhouse?", "flower pot"),
    ("Captain Holm named his sailing boat Silver Heron after a bird he saw in Norway.",
     "What did Captain Holm name his sailing boat?", "Silver Heron"),
    ("Professor Okafor always begins her lectures on volcanoes with a story about Iceland.",
     "With a story about which country does Professor Okafor begin her lectures?", "Iceland"),
    ("The secret ingredient of Greta's apple cake is a spoonful of cardamom.",
     "What is the secret ingredient of Greta's apple cake?", "cardamom"),
    ("The lighthouse at Cape Wren was built by the engineer Thomas Ashdown.",
     "Who built the lighthouse at Cape Wren?", "Ashdown"),
    ("The village choir of Fernley meets every Thursday evening in the old school house.",
     "On which day does the village choir of Fernley meet?", "Thursday"),
    ("The shoemaker Anton Brandt lived above a bakery in Rosemary Street.",
     "Where did the shoemaker Anton Brandt live?", "Rosemary"),
    ("The winning horse of the county race was a grey mare called Misty Morning.",
     "What was the winning horse of the county race called?", "Misty Morning"),
)  # fmt: skip
"""(sentence, question about it, what a right answer holds)"""

# What SmolLM2-135M-Instruct answers rightly with the full cache in float32 comes first: a slow
# machine asks two or three questions, and a wrong answer of stock vLLM hides what eviction loses.
ORDER = (0, 2, 3, 4, 6, 7, 1, 5)
"""Places in :data:`FACTS`, in the order in which they are asked about."""

ASK = "Read the following text and answer the question at its end in one sentence."


@dataclass(frozen=True)
class Question:
    """One fact in a text of about something else."""

    text: str
    question: str
    holds: str

    def message(self) -> str:
        """What a user says to the model."""
        return f"{ASK}\n\n{self.text}\n\nQuestion: {self.question}"

    def messages(self) -> list[str]:
        """The same in two messages: what may be evicted before the question is known, and it."""
        return [f"{ASK}\n\n{self.text}", f"Question: {self.question}"]

    def right(self, answer: str) -> bool:
        return self.holds.lower() in answer.lower()


def questions(count: int, characters: int) -> list[Question]:
    """The first ``count`` of :data:`ORDER`, each in documentation of ``characters`` characters.

    Raises:
        ValueError: There are not so many facts.

    """
    if not 1 <= count <= len(FACTS):
        raise ValueError(f"{count} questions: there are 1 to {len(FACTS)}")
    return [
        Question(hide(random.Random(f"facts/{index}"), [fact], characters), question, holds)
        for index in ORDER[:count]
        for fact, question, holds in [FACTS[index]]
    ]
