"""How much of the model's own prose eviction changes: no task, no right or wrong.

    python -m benchmarks.quality.fidelity [--texts 20] [--context 1400] [--continuation 128]

A text of Python's documentation is cut in two. The server reads the first part, evicts, and is made
to say the second token by token (`forced.py`). Reported are the negative log-likelihood of the true
continuation, and the share of its tokens at which the model's first choice is the full cache's.
With `--interval 128 --continuation 1024` evictions go on in decode: fidelity against position.
"""

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Endpoint, Followed
from benchmarks.quality.fidelity_report import markdown, summarize
from benchmarks.quality.ruler.prose import passage
from benchmarks.server import Server
from benchmarks.smollm2 import real_model

ROOT = Path(__file__).parents[2]
PROSE = "prose"
Rows = list[dict[Cell, Followed]]


def server(model: Path, options: argparse.Namespace) -> Server:
    """A server whose requests choose policy and budget, and say what they are told."""
    args = [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", "32",
        "--kv-cache-memory-bytes", options.kv_memory, "--max-num-seqs", "64",
        "--max-num-batched-tokens", "4096", "--enable-prefix-caching", "--seed", "0",
        "--disable-uvicorn-access-log", "--no-enable-log-requests",
        "--logits-processors", "benchmarks.quality.forced:ForcedTokens",
        "--kv-eviction", options.policies[0], "--kv-eviction-budget", "50%",
        "--kv-eviction-allow", ",".join([*options.policies, "none"]),
        "--kv-eviction-shared-blocks", "evict", *options.server_args,
    ]  # fmt: skip
    if options.layers:
        args += ["--kv-eviction-layers", options.layers, "--kv-eviction-groups", options.groups]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)}
    return Server(model, args, options.work / "server.log", env=env)


def measure(endpoint: Endpoint, options: argparse.Namespace) -> Rows:
    """Every text under every cell; a text's cells are asked at once, after the full cache."""
    cells = [Cell(PROSE, policy, b) for policy in options.policies for b in options.budgets]
    rows: Rows = []
    with (
        tqdm(total=options.texts * (1 + len(cells)), unit="req") as bar,
        ThreadPoolExecutor(len(cells)) as threads,
    ):
        for seed in range(options.texts):
            rng = random.Random(f"fidelity/{seed}")
            wanted = options.context + options.continuation
            ids = endpoint.encode(" ".join(passage(rng, 6 * wanted)))[:wanted]
            context, rest = tuple(ids[: options.context]), tuple(ids[options.context :])

            def ask(
                cell: Cell, context: tuple[int, ...] = context, rest: tuple[int, ...] = rest
            ) -> Followed:
                xargs: dict[str, str | int] = {"kv_eviction": "none"}
                if cell != FULL_CELL:
                    xargs = {
                        "kv_eviction": cell.label,
                        "kv_eviction_budget": cell.budget,
                        "kv_eviction_interval": options.interval,
                    }
                found = endpoint.follow(context, rest, xargs)
                bar.update()
                return found

            full = ask(FULL_CELL)
            others = threads.map(ask, cells)
            rows.append({FULL_CELL: full, **dict(zip(cells, others, strict=True))})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--context", type=int, default=1400, help="tokens before the eviction")
    parser.add_argument("--continuation", type=int, default=128, help="tokens behind it")
    parser.add_argument("--interval", type=int, default=0, help="decode steps between evictions")
    parser.add_argument("--policies", default="streaming-llm,snapkv,ada-snapkv")
    parser.add_argument("--budgets", default="12.5%,25%,50%", help="shares, or tokens")
    parser.add_argument("--bins", type=int, default=1, help="parts of the continuation")
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--kv-memory", default="1G")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", help="shares of layers: a file, or auto")
    parser.add_argument("--groups", default="4", help="groups of layers, with --layers")
    parser.add_argument("--server-args", nargs="*", default=[])
    parser.add_argument("--work", type=Path, default=Path(".cache/quality"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fidelity.json"))
    options = parser.parse_args()
    options.policies, options.budgets = options.policies.split(","), options.budgets.split(",")
    return options


def main() -> None:
    options = parse()
    with server(options.model or real_model(), options) as running:
        rows = measure(Endpoint(running.url), options)
    evictions = running.evictions()
    wanted = options.texts * len(options.policies) * len(options.budgets)
    if evictions["evictions"] < wanted:
        raise SystemExit(f"{evictions} of at least {wanted} evictions: budgets cover the context")
    cells = summarize(rows, options.bins)
    settings = {k: str(v) for k, v in vars(options).items()}
    result = {**provenance(), "options": settings, "evictions": evictions, "cells": cells}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
