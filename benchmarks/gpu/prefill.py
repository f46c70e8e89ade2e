"""The time of a prefill by the engine's clock: no HTTP, no tokenizer, one prompt at a time."""

import random
import time

from benchmarks.server import Server

NAME = "vllm:request_prefill_time_seconds"
FIRST_WORD = 3


def prefill_ms(server: Server, length: int, vocab: int, repeats: int) -> list[float]:
    """From the first chunk's scheduling to the first token, for prompts of ``length`` tokens.

    It includes sampling one token and bringing it to the host. A prompt before those that count
    warms up; no two share a token's place, so nothing comes from the prefix cache.
    """
    found = []
    for seed in range(repeats + 1):
        before, count = (server.metric(f"{NAME}_{kind}") for kind in ("sum", "count"))
        ask(server, length, 1, vocab, seed)
        deadline = time.monotonic() + 30
        while server.metric(f"{NAME}_count") <= count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{NAME} does not count the prompt")
            time.sleep(0.05)
        found.append((server.metric(f"{NAME}_sum") - before) * 1000)
    return found[1:]


def ask(server: Server, length: int, output: int, vocab: int, seed: int) -> None:
    """A prompt of random tokens, alone."""
    words = random.Random(f"{seed} {length} {output}").choices(range(FIRST_WORD, vocab), k=length)
    server.post(
        "/v1/completions",
        {"model": server.model, "prompt": words, "max_tokens": output, "ignore_eos": True},
    )
