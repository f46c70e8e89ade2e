"""One needle under load against KV memory: accuracy and throughput of the same requests."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from benchmarks.pressure.servers import WAYS, Servers, counts, since
from benchmarks.quality.intervals import wilson
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.prompt import AGNOSTIC, AWARE, Prompt, make_prompt, message
from benchmarks.quality.ruler import tasks
from benchmarks.server import Server, Watch

TASK, LENGTH, OUTPUT = "s-niah", 1400, 128
"""An answer has ``OUTPUT`` tokens and begins with the number."""


def prompts(chat: LocalChat, samples: int) -> list[Prompt]:
    """Needles at random places of different texts."""
    characters = tasks.characters_for(TASK, LENGTH, lambda one: len(chat.tokenize(message(one))))
    made = [tasks.make(TASK, characters, seed) for seed in range(samples)]
    return [make_prompt(sample, chat.tokenize, chat.encode) for sample in made]


def ask(server: Server, chat: LocalChat, prompt: Prompt, scenario: str) -> float:
    """Send a prompt, whose context may be evicted before the question is seen; its score."""
    body: dict[str, Any] = {
        "model": server.model, "prompt": list(prompt.ids), "max_tokens": OUTPUT,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if scenario == AGNOSTIC and "--kv-eviction" in server.command:
        body["vllm_xargs"] = {"kv_eviction_at": prompt.context}
    ids = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    return prompt.sample.score(chat.decode(ids[: prompt.sample.max_tokens]))


def run(
    servers: Servers, memories: list[int], samples: int, clients: int, ways: Sequence[str] = WAYS
) -> dict[str, Any]:
    """Every way with every memory; half of the prompts are asked in each scenario.

    Args:
        servers: The servers.
        memories: KV memory, in full requests that fit without eviction.
        samples: Of the task, of each scenario.
        clients: Requests at once.
        ways: Of :data:`WAYS`.

    """
    chat = LocalChat(servers.model)
    asked = prompts(chat, 2 * samples)
    tokens = max(len(prompt.ids) for prompt in asked) + OUTPUT
    # No prompt twice: a prefix cache would save the larger memory half of the prefill.
    pairs = [*((p, AWARE) for p in asked[:samples]), *((p, AGNOSTIC) for p in asked[samples:])]
    rows = []
    with tqdm(total=len(memories) * len(ways), desc="one needle") as bar:
        for memory in memories:
            for way in ways:
                with servers.start(way, memory, tokens) as server:
                    server.warm_up()
                    before, began = counts(server), time.monotonic()
                    with Watch(server) as watch, ThreadPoolExecutor(clients) as pool:
                        scores = list(pool.map(lambda p: ask(server, chat, *p), pairs))
                    seconds = time.monotonic() - began
                    row = {"way": way, "memory": memory, **since(server, before)}
                row["peak_running"] = watch.peak_running
                row["output_tokens_per_s"] = row["sampled"] / seconds
                for scenario in (AWARE, AGNOSTIC):
                    mine = [s for s, (_, its) in zip(scores, pairs, strict=True) if its == scenario]
                    low, high = wilson(sum(mine), len(mine))
                    row[scenario] = {"mean": sum(mine) / len(mine), "low": low, "high": high}
                rows.append(row)
                bar.update()
    return {
        "load": f"{len(pairs)} requests of {tokens - OUTPUT} + {OUTPUT} tokens at most, "
        f"{clients} at once",
        "tokens": tokens,
        "rows": rows,
    }
