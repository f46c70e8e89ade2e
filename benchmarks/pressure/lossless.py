"""Memory for all: the tokens of stock vLLM, no eviction, and what it costs."""

from contextlib import ExitStack
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.pressure.servers import PRESSURE, SEQUENCES, STOCK, Servers, counts, since
from benchmarks.server import Server

PROMPT, OUTPUT = 512, 128


def tokens(server: Server, prompt: str) -> list[int]:
    """A greedy answer, alone in its batch: what else is served changes no rounding."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    return server.post("/v1/completions", body)["choices"][0]["token_ids"]


def run(servers: Servers, prompts: list[str], rounds: int, requests: int) -> dict[str, Any]:
    """Answers of both, one after the other, then loads by turns; both servers are up meanwhile.

    Args:
        servers: The servers.
        prompts: Texts that both must continue alike.
        rounds: Loads of each; who comes first changes.
        requests: Of each load.

    """
    rows: dict[str, list[dict[str, float]]] = {STOCK: [], PRESSURE: []}
    answers: dict[str, list[list[int]]] = {}
    with ExitStack() as running, tqdm(total=2 * rounds + 2, desc="memory for all") as bar:
        up = {}
        for way in rows:
            up[way] = running.enter_context(servers.start(way, SEQUENCES, PROMPT + OUTPUT))
            up[way].warm_up()
        before = {way: counts(server) for way, server in up.items()}
        for way, server in up.items():
            answers[way] = [tokens(server, prompt[: 3 * PROMPT]) for prompt in prompts]
            bar.update()
        for turn in range(rounds):
            load = Load(PROMPT, OUTPUT, requests, SEQUENCES // 2, seed=turn)
            for way in list(rows)[:: 1 if turn % 2 else -1]:
                rows[way].append(measure(up[way], servers.model, load))
                bar.update()
        counted = {way: since(server, before[way]) for way, server in up.items()}
    ratios = [
        ours["output_tokens_per_s"] / stock["output_tokens_per_s"]
        for ours, stock in zip(rows[PRESSURE], rows[STOCK], strict=True)
    ]
    pairs = zip(answers[STOCK], answers[PRESSURE], strict=True)
    return {
        "load": f"{requests} requests of {PROMPT} + {OUTPUT} tokens, {SEQUENCES // 2} at once",
        "same_answers": sum(ours == stock for ours, stock in pairs),
        "answers": len(prompts),
        "tokens_an_answer": OUTPUT,
        "throughput_ratios": [round(ratio, 4) for ratio in ratios],
        "throughput_ratio_median": round(median(ratios), 4),
        "counted": counted,
        "rows": rows,
    }
