"""Loads: what arrives when.

Closed loop, Poisson, conversations, or recorded in the Mooncake trace format.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.job import Job

MOONCAKE_SPAN = 512
"""Tokens that one of a trace's ``hash_ids`` stands for."""

QUIET, BURST = "quiet", "burst"
"""Phases of a load that swings."""


@dataclass(frozen=True)
class Lengths:
    """Tokens drawn evenly from [least, most]."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read ``2000`` or ``1000-4000``.

        Raises:
            ValueError: Neither.

        """
        least, _, most = text.partition("-")
        lengths = cls(int(least), int(most or least))
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"give tokens (2000) or a range (1000-4000), not {text!r}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True)
class Load:
    """What arrives.

    Args:
        prompt: Own tokens of a prompt.
        output: Tokens generated.
        shared: Tokens at the start of every prompt that ``prefixes`` kinds of it share.
        prefixes: Kinds.
        rate: Requests a second, Poisson; None for a closed loop.
        aborts: Share of the requests whose client goes away midway.
        requests: How many in all; None without end.
        seed: Equal seeds, equal loads.
        point: Whether the shared tokens end at the eviction point of every request.
        burst: Requests a second in the second half of every period, in place of ``rate``.
        period: Seconds.

    """

    prompt: Lengths
    output: Lengths
    shared: int = 0
    prefixes: int = 1
    rate: float | None = None
    aborts: float = 0.0
    requests: int | None = None
    seed: int = 0
    point: bool = False
    burst: float | None = None
    period: float = 120.0

    def phase(self, now: float) -> str:
        """The phase of a load with bursts; empty for others."""
        if self.burst is None:
            return ""
        return BURST if now % self.period >= self.period / 2 else QUIET

    def jobs(self) -> Iterator[Job]:
        """The requests by arrival."""
        rng, now = random.Random(self.seed), 0.0
        for number in itertools.count() if self.requests is None else range(self.requests):
            if self.rate is not None:
                rates = {"": self.rate, QUIET: self.rate, BURST: self.burst or self.rate}
                now += rng.expovariate(rates[self.phase(now)])
            output = self.output.draw(rng)
            yield Job(
                number,
                now if self.rate is not None else None,
                self.shared + self.prompt.draw(rng),
                output,
                (rng.randrange(self.prefixes),) if self.shared else (),
                max(1, self.shared),
                _abort(rng, self.aborts, output),
                self.shared if self.point else None,
                self.phase(now),
            )


@dataclass(frozen=True)
class Conversations:
    """Conversations that grow, in a closed loop: their first turns, then their second ones.

    A turn's prompt is everything before it, with the answers, and new tokens.

    Args:
        prompt: New tokens of a turn.
        output: Tokens generated in a turn.
        count: Conversations.
        turns: Turns of each.
        aborts: As in :class:`Load`.
        seed: Equal seeds, equal loads.

    """

    prompt: Lengths
    output: Lengths
    count: int
    turns: int
    aborts: float = 0.0
    seed: int = 0

    def jobs(self) -> Iterator[Job]:
        """The requests by arrival."""
        rng, held = random.Random(self.seed), [0] * self.count
        longest = self.turns * (self.prompt.most + self.output.most)
        for number in range(self.turns * self.count):
            who = number % self.count
            prompt, output = held[who] + self.prompt.draw(rng), self.output.draw(rng)
            held[who] = prompt + output
            gone = _abort(rng, self.aborts, output)
            yield Job(number, None, prompt, output, (who,), longest, gone, continued=True)


@dataclass(frozen=True)
class Trace:
    """Recorded arrivals: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    Args:
        path: The file.
        speed: Replays that much faster.
        longest: Requests with more tokens in all are left out, as the server refuses them.
        aborts: As in :class:`Load`.
        requests: The first so many; None for all.
        seed: For aborts.

    """

    path: Path
    speed: float = 1.0
    longest: int = 131072
    aborts: float = 0.0
    requests: int | None = None
    seed: int = 0

    def jobs(self) -> Iterator[Job]:
        """The requests by arrival."""
        rng, number = random.Random(self.seed), 0
        with self.path.open() as lines:
            for line in lines:
                row = json.loads(line)
                prompt, output = row["input_length"], max(1, row["output_length"])
                if prompt + output > self.longest:
                    continue
                if number == self.requests:
                    return
                yield Job(
                    number,
                    row["timestamp"] / 1000 / self.speed,
                    prompt,
                    output,
                    tuple(row["hash_ids"]),
                    MOONCAKE_SPAN,
                    _abort(rng, self.aborts, output),
                )
                number += 1


def _abort(rng: random.Random, share: float, output: int) -> int | None:
    return rng.randint(1, output) if rng.random() < share else None
