"""A load of random prompts with outputs of different length, and what the server did meanwhile.

A long load has three parts: at first the prompts fill the memory, at last it becomes empty, and
between these each request that ends lets another one begin. Only this steady part shows how many
requests fit, so it is reported apart from the whole.
"""

import asyncio
import json
import random
import statistics
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.server import Server, total
from vllm_kvevict.metrics.prometheus import CAUSES

FIRST_WORD = 3
TIMEOUT_S = 1800
SPREAD = 0.8
"""Outputs have from 1 - SPREAD to 1 + SPREAD times the mean length."""
PREEMPTIONS = "vllm:num_preemptions_total"
WAITING = "vllm:num_requests_waiting_by_reason"
POSTPONED = "vllm_kvevict:postponed_evictions_total"
GAUGES = {
    "running": ("vllm:num_requests_running", ""),
    "waiting": ("vllm:num_requests_waiting", ""),
    "used": ("vllm:kv_cache_usage_perc", ""),
    "preemptions": (PREEMPTIONS, ""),
    "evictions": ("vllm_kvevict:evictions_total", ""),
    "skipped": ("vllm_kvevict:skipped_evictions_total", ""),
    **{
        f"waiting: {reason}": (WAITING, f'reason="{reason}"') for reason in ("capacity", "deferred")
    },
    **{f"postponed: {cause}": (POSTPONED, f'reason="{cause}"') for cause in CAUSES},
}
"""Metrics that are polled, with the label that counts. They are the columns of the series, after
the time in seconds."""


@dataclass(frozen=True)
class Load:
    """Prompts of one length, all known to the server at once up to ``concurrency``; in tokens."""

    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int
    seed: int = 0

    def outputs(self) -> list[int]:
        """The length of each output, the same for every server."""
        rand = random.Random(self.seed)
        least = max(1, round(self.output_len * (1 - SPREAD)))
        return [rand.randint(least, 2 * self.output_len - least) for _ in range(self.num_prompts)]

    @property
    def longest_output(self) -> int:
        return max(self.outputs())

    def prompt(self, index: int, vocab: int) -> list[int]:
        words = random.Random(f"{self.seed} {index} {self.input_len}")
        return words.choices(range(FIRST_WORD, vocab), k=self.input_len)


@dataclass
class Answer:
    """When a request was sent, and when each of its tokens came, in seconds of one clock."""

    sent: float
    times: list[float] = field(default_factory=list)
    error: str | None = None


async def _ask(
    session: aiohttp.ClientSession, server: Server, prompt: list[int], tokens: int
) -> Answer:
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = Answer(time.monotonic())
    counted = 0
    try:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                part = json.loads(text)
                if part.get("choices"):
                    answer.times.append(time.monotonic())
                if part.get("usage"):
                    counted = part["usage"]["completion_tokens"]
        if counted != tokens:
            raise RuntimeError(f"{counted} of {tokens} tokens")
    except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _ask_all(server: Server, load: Load, vocab: int) -> list[Answer]:
    gate = asyncio.Semaphore(load.concurrency)
    prompts = [load.prompt(index, vocab) for index in range(load.num_prompts)]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: list[int], tokens: int) -> Answer:
            async with gate:
                return await _ask(session, server, prompt, tokens)

        pairs = zip(prompts, load.outputs(), strict=True)
        return await asyncio.gather(*(one(*pair) for pair in pairs))


def polled(metrics: str) -> list[float]:
    """The values of :data:`GAUGES`, 0 of what a server has not; all are of one moment."""
    return [round(total(metrics, *gauge), 4) for gauge in GAUGES.values()]


@contextmanager
def _polled(server: Server, interval_s: float) -> Iterator[list[list[float]]]:
    """Rows of seconds and :data:`GAUGES`, polled while the context runs."""
    rows: list[list[float]] = []
    done = threading.Event()
    began = time.monotonic()

    def poll() -> None:
        while not done.wait(interval_s):
            now = round(time.monotonic() - began, 2)
            try:
                rows.append([now, *polled(server.metrics())])
            except (OSError, urllib.error.URLError):
                continue

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        done.set()
        thread.join()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def steady(answers: Sequence[Answer], outputs: Sequence[int]) -> dict[str, float] | None:
    """Tokens per second between the first end of a request and the last first token.

    None if the last request began before the first one ended: then the load never was steady.
    """
    begin = min(answer.times[-1] for answer in answers)
    end = max(answer.times[0] for answer in answers)
    if end <= begin:
        return None
    count = 0.0
    for answer, tokens in zip(answers, outputs, strict=True):
        # A part of an answer may hold several tokens.
        each = tokens / len(answer.times)
        count += each * sum(begin < when <= end for when in answer.times)
    return {"seconds": end - begin, "output_tokens_per_s": count / (end - begin)}


def figures(
    answers: Sequence[Answer], outputs: Sequence[int], series: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Results of a load, as returned by :func:`measure`."""
    done = [(a, n) for a, n in zip(answers, outputs, strict=True) if a.error is None]
    found: dict[str, Any] = {
        "prompts": len(answers), "completed": len(done), "failed": len(answers) - len(done),
        "errors": sorted({a.error for a in answers if a.error is not None})[:3],
    }  # fmt: skip
    if not done:
        raise RuntimeError(f"no answer: {found['errors']}")
    whole = max(a.times[-1] for a, _ in done) - min(a.sent for a, _ in done)
    found["output_tokens_per_s"] = sum(n for _, n in done) / whole
    ttft = [1000 * (a.times[0] - a.sent) for a, _ in done]
    tpot = [1000 * (a.times[-1] - a.times[0]) / (n - 1) for a, n in done if n > 1]
    itl = [1000 * (b - a) for x, _ in done for a, b in zip(x.times, x.times[1:], strict=False)]
    for name, values in {"ttft": ttft, "tpot": tpot, "itl": itl}.items():
        if values:
            found[f"{name}_ms_median"] = statistics.median(values)
            found[f"{name}_ms_p99"] = percentile(values, 0.99)
    part = steady([a for a, _ in done], [n for _, n in done])
    if part is not None:
        found["steady_seconds"] = part["seconds"]
        found["steady_output_tokens_per_s"] = part["output_tokens_per_s"]
    running = [row[1] for row in series]
    found["peak_running"] = max(running, default=0)
    full = [row[1] for row in series if row[2] > 0]
    found["running_while_others_wait"] = statistics.mean(full) if full else None
    found["series"] = {"columns": ["seconds", *GAUGES], "rows": [list(row) for row in series]}
    return found


def measure(server: Server, load: Load, vocab: int, interval_s: float = 0.25) -> dict[str, Any]:
    """Run a load.

    Returns:
        Output tokens per second of the whole load and of its steady part, median and p99 of TTFT,
        TPOT and ITL in ms, the peak of running sequences and their mean while others waited,
        preemptions, completed and failed requests, and the series of :data:`GAUGES`.

    Raises:
        RuntimeError: No request was answered.

    """
    preempted = server.metric(PREEMPTIONS)
    with _polled(server, interval_s) as series:
        answers = asyncio.run(_ask_all(server, load, vocab))
    found = figures(answers, load.outputs(), series)
    found["preemptions"] = server.metric(PREEMPTIONS) - preempted
    return found
