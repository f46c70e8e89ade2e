"""The three ways to serve, with the same KV memory."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo import BLOCK, block_bytes
from benchmarks.server import Server

STOCK, ALWAYS, PRESSURE = "stock", "always", "pressure"
WAYS = (STOCK, ALWAYS, PRESSURE)

SEQUENCES = 16
"""Requests in a batch, at least."""

COUNTS = {
    "evictions": "vllm_kvevict:evictions_total",
    "whole": "vllm_kvevict:whole_requests_total",
    "evicted": "vllm_kvevict:evicted_requests_total",
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
    "sampled": "vllm:generation_tokens_total",
}
"""Counters of a server by what they are called in a result; ours are 0 on stock vLLM."""


@dataclass(frozen=True)
class Servers:
    """Starts them.

    Args:
        model: Folder of the model.
        policy: Of those that evict.
        budget: Tokens per KV head that they keep.
        work: Folder of the logs.
        layers: Shares of layers: a file, or auto.
        sequences: Requests in a batch.
        prefill_interval: Tokens between evictions inside prompts, of the way ``always``; 0 for
            none.

    """

    model: Path
    policy: str
    budget: int
    work: Path
    layers: str | None = None
    sequences: int = SEQUENCES
    prefill_interval: int = 0

    def start(self, way: str, requests: int, tokens: int) -> Server:
        """A server with KV memory for so many full requests of so many tokens each, 2 or more."""
        each = -(-tokens // BLOCK)
        blocks = requests * each + 1
        args = [
            "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK), "--seed", "0",
            "--max-model-len", str((each + 1) * BLOCK), "--max-num-batched-tokens", "2048",
            "--max-num-seqs", str(self.sequences), "--disable-uvicorn-access-log",
            "--kv-cache-memory-bytes", str(blocks * block_bytes(self.model)),
        ]  # fmt: skip
        if way != STOCK:
            args += ["--kv-eviction", self.policy, "--kv-eviction-budget", str(self.budget),
                     "--kv-eviction-when", way]  # fmt: skip
            args += ["--kv-eviction-profile", self.layers] if self.layers else []
        if way == ALWAYS and self.prefill_interval:
            args += ["--kv-eviction-prefill-interval", str(self.prefill_interval)]
        return Server(self.model, args, self.work / f"{way}-{requests}.log")


def counts(server: Server) -> dict[str, int]:
    return {name: int(server.metric(metric)) for name, metric in COUNTS.items()}


def since(server: Server, before: dict[str, int]) -> dict[str, int]:
    """What was counted since :func:`counts`; every request must have ended."""
    return {name: value - before[name] for name, value in counts(server).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--policy", default="ada-defensive")
    parser.add_argument("--budget", type=int, default=192)
    parser.add_argument("--layers", help="shares of layers: a file, or auto")
    parser.add_argument(
        "--prefill-interval", type=int, default=0, help="evictions inside prompts, under `always`"
    )
    parser.add_argument("--work", type=Path, default=Path(".cache/pressure"))
