"""One thing that eviction does not work with, told in one sentence."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WITHOUT = "serve this model without --kv-eviction"


class Refusal(NamedTuple):
    """One row: ``applies`` says whether the configuration has ``what``; ``advice`` what to do."""

    what: str
    why: str
    advice: str
    applies: Callable[["VllmConfig"], Any]

    def sentence(self) -> str:
        return f"KV eviction does not support {self.what}, because {self.why}; {self.advice}."
