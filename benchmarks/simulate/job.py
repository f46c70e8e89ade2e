"""One request of a load, and the hashes by which its blocks are found again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

TOKEN = 7
"""Every token: what a block holds is told by its hash alone."""


@dataclass(frozen=True)
class Job:
    """A request, in tokens.

    Args:
        number: Unique in its load.
        arrival: Seconds; None in a closed loop.
        prompt: Length.
        output: Tokens that it generates.
        spans: Names of the first spans of the prompt: equal names, equal prefixes.
        span: Tokens of each of them.
        abort_after: Tokens after which the client goes away; None for never.
        point: Its eviction point; None for the end of the prompt.
        phase: Of the load in which it arrives; empty where a load has none.
        continued: True if the spans cover the answer as well: a later prompt begins with it.

    """

    number: int
    arrival: float | None
    prompt: int
    output: int
    spans: tuple[int, ...] = ()
    span: int = 1
    abort_after: int | None = None
    point: int | None = None
    phase: str = ""
    continued: bool = False

    @property
    def request_id(self) -> str:
        return f"r{self.number}"

    def request(self, block_size: int) -> "Request":
        """What the front end would hand to the engine core."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from vllm_kvevict.config.requests import AT

        asked = {AT: self.point} if self.point else None
        return Request(
            self.request_id,
            [TOKEN] * self.prompt,
            SamplingParams(max_tokens=self.output, ignore_eos=True, extra_args=asked),
            None,
            arrival_time=self.arrival or 0.0,
            block_hasher=self._hasher(block_size),
        )

    def _hasher(self, block_size: int) -> "Callable[[Request], list[Any]]":
        longest = self.prompt + self.output if self.continued else self.prompt
        shared = min(len(self.spans) * self.span, longest) // block_size

        def hashes(request: "Request") -> list[Any]:
            first, last = len(request.block_hashes), request.num_tokens // block_size
            return [self._hash(index, block_size, index < shared) for index in range(first, last)]

        return hashes

    def _hash(self, index: int, block_size: int, shared: bool) -> bytes:
        if not shared:
            return b"own %d %d" % (self.number, index)
        return b"shared %d %d" % (self.spans[index * block_size // self.span], index)
