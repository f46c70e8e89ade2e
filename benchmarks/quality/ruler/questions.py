"""RULER's question answering (section 3): one of many documents holds the answer.

RULER takes its documents from SQuAD. Here they are short lives of invented people, which no model
can know, between paragraphs of prose.
"""

import random
from dataclasses import dataclass

from benchmarks.quality.ruler.prose import paragraphs
from benchmarks.quality.ruler.sample import RulerSample

ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
CONTEXT = ASK + "\n\nThe following are given documents.\n\n{documents}\n\n" + ASK + "\n"
FIRST = "Ada Bruno Clara Diego Elena Felix Greta Hugo Irene Jonas Katya Leon Mira Nadia Oscar Petra Quentin Rosa Stefan Tamara".split()  # noqa: E501
LAST = "Albrecht Bergman Castillo Dunmore Ekström Fontaine Garrick Halloran Ivanov Jansen Keller Lindqvist Moreau Novak Okafor Pereira Rasmussen Santoro Thornton Varga".split()  # noqa: E501
CITIES = "Lisbon Oslo Vienna Dublin Krakow Naples Seville Antwerp Bergen Geneva Tallinn Porto Zagreb Riga Bristol Leipzig Utrecht Malmo Verona Nantes".split()  # noqa: E501
WORK = "astronomer baker carpenter dentist editor farmer geologist historian journalist librarian mechanic nurse organist pharmacist sculptor surveyor tailor translator violinist weaver".split()  # noqa: E501
PETS = "beagle canary ferret gecko hamster hedgehog iguana macaw parrot poodle rabbit spaniel tabby terrier tortoise".split()  # noqa: E501
INSTRUMENTS = "accordion banjo bassoon cello clarinet drums flute guitar harp mandolin oboe piano saxophone trombone trumpet".split()  # noqa: E501


@dataclass(frozen=True)
class Person:
    """An invented life of six facts."""

    name: str
    born: str
    year: str
    work: str
    home: str
    pet: str
    instrument: str

    def document(self) -> str:
        return (
            f"{self.name} was born in {self.born} in {self.year}. After school {self.name} trained "
            f"as a {self.work} and later moved to {self.home}, where the family still lives. At "
            f"home there is a {self.pet}, and on most evenings {self.name} plays the "
            f"{self.instrument}."
        )

    def questions(self) -> list[tuple[str, str]]:
        return [
            (f"In which city was {self.name} born?", self.born),
            (f"In which year was {self.name} born?", self.year),
            (f"As what did {self.name} train after school?", self.work),
            (f"To which city did {self.name} later move?", self.home),
            (f"What animal is there at the home of {self.name}?", self.pet),
            (f"Which instrument does {self.name} play?", self.instrument),
        ]


def _person(rng: random.Random, name: str) -> Person:
    born, home = rng.sample(CITIES, 2)
    return Person(
        name, born, str(rng.randrange(1900, 2000)), rng.choice(WORK), home, rng.choice(PETS),
        rng.choice(INSTRUMENTS),
    )  # fmt: skip


def question(rng: random.Random, task: str, characters: int) -> RulerSample:
    """Lives and paragraphs of prose in turn, shuffled; one fact of one life is asked for."""
    names = iter(
        f"{first} {last}"
        for first, last in zip(
            rng.sample(FIRST, len(FIRST)) * 5, [n for _ in range(5) for n in rng.sample(LAST, 20)],
            strict=True,
        )
    )  # fmt: skip
    people, documents, prose = [], [], list(rng.sample(paragraphs(), len(paragraphs())))
    while sum(len(text) + 16 for text in documents) < characters:
        if len(people) * 3 <= len(documents):
            people.append(_person(rng, next(names)))
            documents.append(people[-1].document())
        else:
            documents.append(prose.pop())
    rng.shuffle(documents)
    text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
    asked, answer = rng.choice(rng.choice(people).questions())
    return RulerSample(
        task, CONTEXT.format(documents=text), f"Question: {asked}", "Answer:", (answer,),
        max_tokens=32, any_answer=True,
    )  # fmt: skip
