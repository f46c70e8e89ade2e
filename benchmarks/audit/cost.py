"""Part 3: the throughput of `vllm serve` with audits of no, some and all requests."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.audit.engine import PROFILED
from benchmarks.demo import BLOCK, block_bytes
from benchmarks.load import Load, measure
from benchmarks.server import Server

WITHOUT = "0"
COUNTERS = ("evictions", "tokens_audited", "audits_dropped")
PROMPTS, ANSWERS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


def flags(policy: str, budget: str, share: str) -> list[str]:
    """A server's flags of eviction; ``share`` is that of the audited requests."""
    args = ["--kv-eviction", policy, "--kv-eviction-budget", budget]
    if policy in {*PROFILED, "auto"}:
        args += ["--kv-eviction-profile", "auto"]
    return args if share == WITHOUT else [*args, "--kv-eviction-audit", share]


def counts(server: Server) -> dict[str, int]:
    """Evictions, tokens computed for audits, and tokens of prompts and answers, so far."""
    totals = server.evictions()
    found = {name: totals[name] for name in COUNTERS}
    found["tokens"] = int(server.metric(PROMPTS) + server.metric(ANSWERS))
    return found


def ratios(rows: dict[str, list[dict[str, Any]]], share: str) -> list[float]:
    """Output tokens per second over those without audits, round by round."""
    return [
        with_audits["output_tokens_per_s"] / without["output_tokens_per_s"]
        for without, with_audits in zip(rows[WITHOUT], rows[share], strict=False)
    ]


def summary(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for each share of audited requests that was loaded."""
    found = []
    for share, mine in rows.items():
        if not mine:
            continue
        total = {name: sum(row[name] for row in mine) for name in (*COUNTERS, "tokens")}
        each = ratios(rows, share)
        found.append(
            {
                "audit": share,
                "loads": len(mine),
                "output_tokens_per_s": median(row["output_tokens_per_s"] for row in mine),
                "ratio": median(each) if each else None,
                "ratios": [round(one, 4) for one in each],
                "audited_share": total["tokens_audited"] / total["tokens"],
                **total,
            }
        )
    return found


def run(
    model: Path,
    policy: str,
    budget: str,
    shares: Sequence[str],
    load: Load,
    rounds: int,
    work: Path,
    found: Callable[[dict[str, Any]], object],
) -> None:
    """All servers are up at once; each round loads one after the other, in turning order.

    Args:
        model: Folder of the model.
        policy: Of all servers.
        budget: Of all servers.
        shares: Of audited requests, such as ``1%``; :data:`WITHOUT` is always there.
        load: Sent to each server in each round, with other prompts a round.
        rounds: Loads of each server.
        work: Folder of the logs.
        found: Told of the result so far after each round.

    """
    names = list(dict.fromkeys([WITHOUT, *shares]))
    longest = -(-(load.input_len + load.output_len) // BLOCK) + 2
    blocks = (load.concurrency + 2) * longest + 1
    common = [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK), "--seed", "0",
        "--max-model-len", str(longest * BLOCK), "--max-num-batched-tokens", "2048",
        "--max-num-seqs", str(2 * load.concurrency), "--disable-uvicorn-access-log",
        "--kv-cache-memory-bytes", str(blocks * block_bytes(model)), "--enable-prefix-caching",
    ]  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as running, tqdm(total=len(names) * rounds, unit="load") as bar:
        up = {}
        for name in names:
            bar.set_description(f"start, audit {name}")
            log = work / f"audit-{name.rstrip('%')}.log"
            server = Server(model, [*common, *flags(policy, budget, name)], log)
            up[name] = running.enter_context(server)
            # The first requests of a server pay for warm-up.
            measure(up[name], model, Load(64, 16, 4, 4, seed=99))
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                bar.set_description(f"round {turn + 1}, audit {name}")
                before = counts(up[name])
                asked = Load(
                    load.input_len, load.output_len, load.num_prompts, load.concurrency, seed=turn
                )
                row = measure(up[name], model, asked)
                after = counts(up[name])
                rows[name].append(row | {key: after[key] - before[key] for key in after})
                bar.update()
            found(
                {
                    "policy": policy, "budget": budget,
                    "load": f"{load.num_prompts} requests of {load.input_len} + "
                    f"{load.output_len} tokens, {load.concurrency} at once, {turn + 1} rounds",
                    "servers": summary(rows), "rows": rows,
                }
            )  # fmt: skip
