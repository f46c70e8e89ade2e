"""The loads of the sweep, as datasets of ``vllm bench serve``."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CHUNK = 16
"""Tokens that one hash of a trace stands for."""


class Dataset(Protocol):
    """What ``vllm bench serve`` is told, apart from server and model."""

    @property
    def name(self) -> str: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        ...

    def args(self) -> list[str]: ...


@dataclass(frozen=True)
class Random:
    """Prompts that share nothing. Lengths in tokens."""

    prompt: int
    output: int
    requests: int
    concurrency: int
    name: str = "random"

    @property
    def longest(self) -> int:
        return self.prompt + self.output

    def args(self) -> list[str]:
        return [
            "--dataset-name", "random",
            "--random-input-len", str(self.prompt),
            "--random-output-len", str(self.output),
            *_closed(self.requests, self.concurrency),
        ]  # fmt: skip


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts of which three quarters are one of four prefixes."""

    prompt: int
    output: int
    requests: int
    concurrency: int
    name: str = "shared-prefix"
    prefixes: int = 4

    @property
    def longest(self) -> int:
        return self.prompt + self.output

    def args(self) -> list[str]:
        prefix = self.prompt * 3 // 4
        return [
            "--dataset-name", "prefix_repetition",
            "--prefix-repetition-prefix-len", str(prefix),
            "--prefix-repetition-suffix-len", str(self.prompt - prefix),
            "--prefix-repetition-num-prefixes", str(self.prefixes),
            "--prefix-repetition-output-len", str(self.output),
            *_closed(self.requests, self.concurrency),
        ]  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """A trace replayed at its own times, written by :meth:`write`.

    Requests arrive in bursts (gamma-distributed gaps, coefficient of variation 2), with prompts
    of a quarter of ``prompt`` to all of it, answers likewise, half of them with one of eight
    shared beginnings.

    Args:
        rate: Requests a second, on average.

    """

    prompt: int
    output: int
    requests: int
    rate: float
    path: Path
    name: str = "timed-trace"
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.prompt + self.output

    def write(self) -> None:
        """One JSON object a line: seconds, lengths in tokens, one hash for every chunk."""
        rng = random.Random(self.seed)
        now, fresh, lines = 0.0, 10**6, []
        for _ in range(self.requests):
            prompt = rng.randint(self.prompt // 4, self.prompt)
            chunks = -(-prompt // CHUNK)
            shared = rng.randrange(8) * 1000
            count = chunks // 2 if rng.random() < 0.5 else 0
            hashes = [shared + n for n in range(count)]
            hashes += [fresh + n for n in range(chunks - count)]
            fresh += chunks
            lines.append(
                dict(
                    timestamp=round(now, 3),
                    input_length=prompt,
                    output_length=rng.randint(self.output // 4, self.output),
                    hash_ids=hashes,
                )
            )
            now += rng.gammavariate(0.25, 4 / self.rate)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def args(self) -> list[str]:
        return [
            "--dataset-name", "timed_trace",
            "--dataset-path", str(self.path),
            "--timed-trace-chunk-hash-size", str(CHUNK),
            "--num-prompts", str(self.requests),
            "--seed", str(self.seed),
        ]  # fmt: skip


def _closed(requests: int, concurrency: int) -> list[str]:
    return [
        "--num-prompts", str(requests), "--max-concurrency", str(concurrency),
        "--seed", "0", "--ignore-eos",
    ]  # fmt: skip
