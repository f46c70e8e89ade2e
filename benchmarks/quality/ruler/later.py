"""Kinds of facts that were written when all of ``probe`` was chosen, weights of prose included.

``unseen`` is older than those weights, which were chosen with its samples in view. The prose of
these is NetworkX's docstrings.
"""

import random

from benchmarks.quality.ruler.facts import Kind, fact, number, of
from benchmarks.quality.ruler.sample import RulerSample

PACKAGE = "networkx"

KINDS: tuple[Kind, ...] = (
    ("Grandmother {n} knitted a scarf out of {x} wool.",
     "Out of what wool did grandmother {n} knit a scarf?",
     "Grandmother {n} knitted a scarf out of", of("alpaca|merino|lambs|cashmere|angora")),
    ("The parrot that belongs to {n} imitates a {x}.",
     "What does the parrot that belongs to {n} imitate?",
     "The parrot that belongs to {n} imitates a",
     of("doorbell|siren|kettle|telephone|vacuum cleaner")),
    ("Under {n}'s command the submarine dived {x} fathoms deep.",
     "How many fathoms deep dived the submarine under {n}'s command?",
     "Under {n}'s command the submarine dived", number(30, 600)),
    ("{n} traded the old tractor for a {x}.", "For what did {n} trade the old tractor?",
     "{n} traded the old tractor for a", of("donkey|caravan|trailer|motorcycle|pony")),
    ("The recipe by {n} requires {x} teaspoons of vinegar.",
     "How many teaspoons of vinegar requires the recipe by {n}?",
     "The recipe by {n} requires", number(3, 90)),
    ("During the eclipse {n} was asleep on a {x}.",
     "On what was {n} asleep during the eclipse?",
     "During the eclipse {n} was asleep on a", of("sofa|raft|hammock|haystack|mattress")),
    ("The tram driven by {n} is painted with {x}.", "With what is the tram driven by {n} painted?",
     "The tram driven by {n} is painted with", of("stripes|dolphins|daisies|butterflies|stars")),
    ("Professor {n} carved the chess pieces from {x}.",
     "From what did Professor {n} carve the chess pieces?",
     "Professor {n} carved the chess pieces from", of("ivory|walnut|marble|ebony|soap|bone")),
    ("The marathon runner {n} wore bib {x}.", "Which bib wore the marathon runner {n}?",
     "The marathon runner {n} wore bib", number(100, 9999)),
    ("{n} is allergic to {x}, says the nurse.", "To what is {n} allergic?", "{n} is allergic to",
     of("peanuts|pollen|shellfish|penicillin|latex|celery")),
    ("The fountain that {n} donated sprays water {x} feet high.",
     "How many feet high sprays the fountain that {n} donated?",
     "The fountain that {n} donated sprays water", number(11, 99)),
    ("The smugglers told {n} to wait at the {x}.", "Where did the smugglers tell {n} to wait?",
     "The smugglers told {n} to wait at the",
     of("quarry|windmill|ferry|crossroads|cemetery|tavern")),
    ("{n} inherited a {x} from an uncle.", "What did {n} inherit from an uncle?",
     "{n} inherited a", of("telescope|castle|harmonium|gramophone|brewery|sword")),
    ("The puppet theatre of {n} seats {x} children.",
     "How many children seats the puppet theatre of {n}?",
     "The puppet theatre of {n} seats", number(20, 400)),
)  # fmt: skip


def later(rng: random.Random, task: str, characters: int) -> RulerSample:
    """As :func:`~benchmarks.quality.ruler.facts.fact`, of these kinds in this prose."""
    return fact(rng, task, characters, KINDS, PACKAGE)
