"""The view of a run that the picture, the table and the JSON share."""

from dataclasses import dataclass

from vllm_kvevict.tools.inspect.engine import Run
from vllm_kvevict.tools.inspect.find import Sighting, look_for
from vllm_kvevict.tools.inspect.kept import Snapshot
from vllm_kvevict.tools.inspect.options import Options
from vllm_kvevict.tools.inspect.spans import Span, most_kept


@dataclass(frozen=True)
class View:
    """A run with its most kept spans and the texts the user looks for."""

    options: Options
    run: Run
    spans: list[Span]
    sightings: list[Sighting]

    @classmethod
    def of(cls, options: Options, run: Run) -> "View":
        """Look at the snapshot of ``run``; spans are those in front of the tail."""
        snapshot = run.snapshot
        counts = snapshot.counts().sum(0)[: snapshot.tail_start]
        spans = most_kept(counts, snapshot.num_heads, options.spans)
        return cls(options, run, spans, look_for(options.find, run.prompt, snapshot))

    @property
    def snapshot(self) -> Snapshot:
        return self.run.snapshot

    @property
    def policy(self) -> str:
        """The policy and its budget, in words."""
        config = self.run.config
        share = f" ({config.budget} of the prompt)" if config.budget_share else ""
        return f"{config.policy}, budget {self.run.budget} tokens per KV head{share}"

    @property
    def evictions(self) -> str:
        """How many evictions the whole run had, in words."""
        return f"{self.run.evictions} eviction{'s' * (self.run.evictions > 1)} in all"

    @property
    def moment(self) -> str:
        """When the snapshot was taken, in words."""
        n, prompt = self.snapshot.num_tokens, len(self.run.prompt.ids)
        if n < prompt:
            return f"after the eviction at token {n}, before the other {prompt - n} of the prompt"
        if n == prompt:
            return "after prefill"
        return f"after the eviction at token {n}, {n - prompt} of them generated"

    def text(self, start: int, stop: int, width: int) -> str:
        """Positions [start, stop) on one line of at most ``width`` characters."""
        return shorten(self.run.decode(start, stop), width)


def shorten(text: str, width: int) -> str:
    """One line of at most ``width`` characters, the middle left out; what cannot be printed
    shows as a sign."""
    line = text.replace("\n", "⏎").replace("\t", " ")
    line = "".join(sign if sign.isprintable() else "·" for sign in line)
    if len(line) <= width:
        return line
    front = (width - 3) * 2 // 3
    return f"{line[:front]} … {line[len(line) - (width - 3 - front) :]}"
