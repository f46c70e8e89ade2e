"""How much eviction changes the continuation of prose or code: no task, no right or wrong.

    python -m benchmarks.quality.fidelity [--texts 20] [--context 1400] [--continuation 128]

A text of Python's documentation, or with `--source code` of NetworkX's code, is cut in two. The
server reads the first part, evicts, and is made to say the second token by token (`forced.py`).
Reported are the negative log-likelihood of the true continuation, and the share of its tokens at
which the model's first choice is the full cache's. With `--interval 128 --continuation 1024
--bins 8 --spread` evictions go on in decode: fidelity against position, which
`python -m benchmarks.quality.position` draws.
"""

import argparse
import json
import os
import random
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Endpoint, Followed
from benchmarks.quality.fidelity_report import markdown, summarize
from benchmarks.quality.ruler.prose import passage, spread
from benchmarks.quality.ruler.source_code import piece
from benchmarks.server import Server
from benchmarks.smollm2 import real_model

ROOT = Path(__file__).parents[2]
PROSE, CODE = "prose", "code"
WAIT = 64
"""Steps that a decode eviction may wait for its turn among many."""
Row = dict[Cell, Followed]


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
        args += ["--kv-eviction-profile", options.layers]
        args += ["--kv-eviction-options.groups", options.groups] if options.groups else []
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(options.threads)}
    return Server(model, args, options.work / "server.log", env=env)


def cells(options: argparse.Namespace) -> list[Cell]:
    return [Cell(PROSE, policy, b) for policy in options.policies for b in options.budgets]


def asked(cell: Cell, interval: int) -> dict[str, str | int]:
    """The ``vllm_xargs`` of a request under ``cell``."""
    if cell == FULL_CELL:
        return {"kv_eviction": "none"}
    return {
        "kv_eviction": cell.label,
        "kv_eviction_budget": cell.budget,
        "kv_eviction_interval": interval,
    }


def texts(endpoint: Endpoint, options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Token ids of each text, context and continuation.

    Raises:
        ValueError: A passage is too short.

    """
    wanted = options.context + options.continuation
    found = []
    for seed in range(options.first, options.first + options.texts):
        rng = random.Random(f"fidelity/{seed}")
        if options.source == CODE:
            text = piece(rng, 6 * wanted)
        else:
            place = spread(seed, options.texts) if options.spread else None
            text = " ".join(passage(rng, 6 * wanted, place))
        ids = endpoint.encode(text, special=True)[:wanted]
        if len(ids) < wanted:
            raise ValueError(f"text {seed} has {len(ids)} tokens, {wanted} are needed")
        found.append(tuple(ids))
    return found


def measure(endpoint: Endpoint, options: argparse.Namespace) -> Iterator[Row]:
    """Each text under every cell; a text's cells are asked at once, after the full cache."""
    mine = cells(options)
    with (
        tqdm(total=options.texts * (1 + len(mine)), unit="req") as bar,
        ThreadPoolExecutor(options.at_once) as outer,
        ThreadPoolExecutor(options.at_once * len(mine)) as inner,
    ):

        def ask(cell: Cell, ids: tuple[int, ...]) -> Followed:
            context, rest = ids[: options.context], ids[options.context :]
            found = endpoint.follow(context, rest, asked(cell, options.interval))
            bar.update()
            return found

        def under_all(ids: tuple[int, ...]) -> Row:
            full = ask(FULL_CELL, ids)
            others = inner.map(ask, mine, [ids] * len(mine))
            return {FULL_CELL: full, **dict(zip(mine, others, strict=True))}

        yield from outer.map(under_all, texts(endpoint, options))


def write(options: argparse.Namespace, rows: list[Row], evictions: dict[str, int]) -> str:
    """The result of the texts so far as JSON and Markdown; the latter is returned."""
    settings = {k: str(v) for k, v in vars(options).items()} | {"texts": str(len(rows))}
    summary = summarize(rows, options.bins)
    result = {**provenance(), "options": settings, "evictions": evictions, "cells": summary}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    options.output.with_suffix(".md").write_text(text)
    return text


def check(options: argparse.Namespace, rows: list[Row], evictions: dict[str, int]) -> None:
    """Every evicting request evicted after prefill and, with an interval, at all due lengths.

    Raises:
        SystemExit: Fewer evictions than that.

    """
    wanted = len(rows) * len(cells(options))
    if options.interval:
        # The last token is never read; an eviction may wait for its turn some steps.
        wanted += wanted * ((options.continuation - 1 - WAIT) // options.interval)
    found = evictions["evictions"]
    if found < wanted:
        raise SystemExit(f"{found} of at least {wanted} evictions: budgets cover the text")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=(PROSE, CODE), default=PROSE)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--context", type=int, default=1400, help="tokens before the eviction")
    parser.add_argument("--continuation", type=int, default=128, help="tokens behind it")
    parser.add_argument("--interval", type=int, default=0, help="decode steps between evictions")
    parser.add_argument("--policies", default="streaming-llm,snapkv,ada-snapkv")
    parser.add_argument("--budgets", default="12.5%,25%,50%", help="shares, or tokens")
    parser.add_argument("--bins", type=int, default=1, help="parts of the continuation")
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--first", type=int, default=0, help="number of the first text")
    parser.add_argument("--spread", action="store_true", help="prose begins at equal distances")
    parser.add_argument("--at-once", type=int, default=1, help="texts asked at once")
    parser.add_argument("--kv-memory", default="1G")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", help="shares of layers: a file, or auto")
    parser.add_argument("--groups", help="of layers, with --layers; the server's choice without")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more, in one word")
    parser.add_argument("--work", type=Path, default=Path(".cache/quality"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fidelity.json"))
    options = parser.parse_args()
    options.policies, options.budgets = options.policies.split(","), options.budgets.split(",")
    return options


def main() -> None:
    options = parse()
    rows: list[Row] = []
    with server(options.model or real_model(), options) as running:
        for row in measure(Endpoint(running.url, timeout_s=7200), options):
            rows.append(row)
            write(options, rows, running.evictions())
    evictions = running.evictions()
    check(options, rows, evictions)
    print(write(options, rows, evictions))


if __name__ == "__main__":
    main()
