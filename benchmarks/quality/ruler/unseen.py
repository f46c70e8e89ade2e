"""Kinds of facts that nothing was chosen by: neither learned from, nor looked at for a form.

``facts`` has the kinds by which the form of ``probe`` was chosen. These were written when that was
done. Their prose is SymPy's docstrings.
"""

import random

from benchmarks.quality.ruler.facts import Kind, fact, number, of
from benchmarks.quality.ruler.sample import RulerSample

PACKAGE = "sympy"

KINDS: tuple[Kind, ...] = (
    ("The beehives of {n} stand behind the {x}.", "Behind what do the beehives of {n} stand?",
     "The beehives of {n} stand behind the", of("barn|chapel|vineyard|sawmill|orchard")),
    ("{n} repairs {x} in a cellar workshop.", "What does {n} repair in a cellar workshop?",
     "{n} repairs", of("accordions|typewriters|radios|sewing machines|toasters")),
    ("The glacier measured by {n} shrank by {x} centimetres.",
     "By how many centimetres shrank the glacier measured by {n}?",
     "The glacier measured by {n} shrank by", number(20, 990)),
    ("As a child, {n} was afraid of {x}.", "What was {n} afraid of as a child?",
     "As a child, {n} was afraid of", of("geese|thunder|escalators|mirrors|scarecrows|clowns")),
    ("The elevator of {n}'s building stops on floor {x}.",
     "On which floor stops the elevator of {n}'s building?",
     "The elevator of {n}'s building stops on floor", number(2, 60)),
    ("{n} sealed the envelope with {x} wax.", "With what wax did {n} seal the envelope?",
     "{n} sealed the envelope with", of("crimson|golden|turquoise|violet|amber")),
    ("The opera that {n} conducted lasted {x} minutes.",
     "How many minutes lasted the opera that {n} conducted?",
     "The opera that {n} conducted lasted", number(90, 290)),
    ("{n} feeds the penguins every {x}.", "When does {n} feed the penguins?",
     "{n} feeds the penguins every", of("morning|evening|noon|midnight|hour")),
    ("The locker of {n} at the swimming pool is number {x}.",
     "Which number has the locker of {n} at the swimming pool?",
     "The locker of {n} at the swimming pool is number", number(100, 999)),
    ("{n} wrapped the vase in {x}.", "In what did {n} wrap the vase?", "{n} wrapped the vase in",
     of("newspaper|straw|velvet|seaweed|bubble foil|linen")),
    ("The comet discovered by {n} returns in {x} years.",
     "In how many years returns the comet discovered by {n}?",
     "The comet discovered by {n} returns in", number(12, 400)),
    ("Judge {n} fined the baker for {x}.", "For what did Judge {n} fine the baker?",
     "Judge {n} fined the baker for",
     of("noise|smoke|littering|gambling|speeding|trespassing")),
)  # fmt: skip


def unseen(rng: random.Random, task: str, characters: int) -> RulerSample:
    """As :func:`~benchmarks.quality.ruler.facts.fact`, of these kinds in this prose."""
    return fact(rng, task, characters, KINDS, PACKAGE)
