"""The mixture of the audits, and four values that are asked for at once."""

from collections.abc import Sequence

from benchmarks.audit.prompts import KINDS as AUDITED
from benchmarks.audit.prompts import Document, Mixture
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.ruler import tasks

FOUR_KNOWN = "four values, question known"
FOUR = "four values, question not known"
KINDS = (*AUDITED[:2], FOUR_KNOWN, FOUR, *AUDITED[2:])

FOUR_TASK = "mv-niah"


class WithFourValues(Mixture):
    """As the mixture, with documents that hold four numbers of one key."""

    def __init__(self, chat: LocalChat, tokens: int, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(chat, tokens, kinds)
        if FOUR in kinds or FOUR_KNOWN in kinds:
            characters = tasks.characters_for(FOUR_TASK, tokens, self._count)
            self._characters[FOUR_TASK] = characters

    def documents(self, seed: int) -> list[Document]:
        found = super().documents(seed)
        if FOUR_TASK in self._characters:
            found.append(self._asked(FOUR_TASK, seed, {FOUR_KNOWN: True, FOUR: False}))
        return found
