"""``python -m benchmarks.audit.recorded``: does ``measure --recorded`` agree with the audits?

One server audits every eviction while recorded answers are scored over it, so that both judge the
same evictions of the same requests. An audit compares distributions at the last tokens before the
eviction; the command compares the probabilities of the answer's tokens after it. Answers are drawn
from the full cache at temperature 1, so that their loss is an estimate of a KL divergence, too.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.audit.prompts import KINDS, Mixture
from benchmarks.provenance import provenance, sentence, used
from benchmarks.quality.local_chat import LocalChat
from benchmarks.server import Server
from benchmarks.smollm2 import real_model
from vllm_kvevict.tools.measure.__main__ import main as measure
from vllm_kvevict.tools.measure.loss import Loss, loss_of
from vllm_kvevict.tools.measure.score import Score

KL = "vllm_kvevict:audit_kl_nats"
ANSWER = 32
"""Tokens of an answer."""


def record(server: Server, mixture: Mixture, count: int, path: Path) -> None:
    """Write so many requests of all kinds, with answers of the full cache."""
    seed, written = 0, 0
    with path.open("w") as out:
        while written < count:
            for document in mixture.documents(seed):
                for kind, point in document.points.items():
                    body = {
                        "model": server.model, "prompt": list(document.ids), "max_tokens": ANSWER,
                        "temperature": 1.0, "ignore_eos": True, "return_token_ids": True,
                    }  # fmt: skip
                    response = server.post(
                        "/v1/completions", body | {"vllm_xargs": {"kv_eviction": "none"}}
                    )
                    body["vllm_xargs"] = {"kv_eviction_at": point}
                    row = {"request": body, "response": response, "kind": kind}
                    out.write(json.dumps(row) + "\n")
                    written += 1
                    if written == count:
                        return
            seed += 1


def at_budget(server: Server, recorded: Path, budget: str) -> tuple[list[Score], float, int]:
    """Return the scores at a budget, and the mean and the number of the audits meanwhile."""
    out = recorded.with_suffix(".scores")
    before = [server.metric(f"{KL}_{part}") for part in ("sum", "count")]
    words = ["--recorded", str(recorded), "--base-url", server.url, "--budgets", budget]
    if measure([*words, "--concurrency", "1", "--output", str(out)]):
        raise RuntimeError(f"{recorded} could not be scored")
    # The last audit is on its way.
    server.warm_up()
    nats, audits = (
        server.metric(f"{KL}_{part}") - old
        for part, old in zip(("sum", "count"), before, strict=True)
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        del row["budget"]
    return [Score(**row) for row in rows], nats / max(1, audits), int(audits)


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown."""
    found = [
        "| budget | requests | recorded, nats a token | 95% | audits | mean audit, nats | inside |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        inside = row["low"] <= row["audit"] <= row["high"] if row["audits"] else None
        audit = f"{row['audit']:.4f}" if row["audits"] else "-"
        found.append(
            f"| {row['budget']} | {row['group']} | {row['mean']:.4f} | [{row['low']:.4f}, "
            f"{row['high']:.4f}] | {row['audits'] or '-'} | {audit} | "
            f"{'-' if inside is None else 'yes' if inside else 'no'} |"
        )
    return found


def row(budget: str, loss: Loss, audit: float = 0.0, audits: int = 0) -> dict[str, Any]:
    return {"budget": budget, "audit": audit, "audits": audits, **vars(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit.recorded")
    add = parser.add_argument
    add("--requests", type=int, default=200)
    add("--tokens", type=int, default=1300, help="of a prompt, about")
    add("--policy", default="auto")
    add("--budgets", default="50%,12.5%,4%", help="the last is deliberately small")
    add("--dtype", default="float32")
    add("--work", type=Path, default=Path(".cache/recorded"))
    add("--out", type=Path, help="a name that ends in .json; a table is written next to it")
    options = parser.parse_args()
    origin, model, rows = provenance(), real_model(), []
    options.work.mkdir(parents=True, exist_ok=True)
    flags = [
        "--dtype", options.dtype, "--enforce-eager", "--block-size", "32", "--seed", "0",
        "--max-model-len", "4096", "--kv-cache-memory-bytes", "1G",
        "--kv-eviction", options.policy, "--kv-eviction-budget", "25%", "--kv-eviction-interval",
        "0", "--kv-eviction-allow", "none", "--kv-eviction-audit", "100%",
        "--kv-eviction-shared-blocks", "evict",
    ]  # fmt: skip
    with Server(model, flags, options.work / "server.log") as server:
        recorded = options.work / "recorded.jsonl"
        record(server, Mixture(LocalChat(model), options.tokens), options.requests, recorded)
        for budget in options.budgets.split(","):
            scores, audit, audits = at_budget(server, recorded, budget)
            rows.append(row(budget, loss_of("all", scores), audit, audits))
            for kind in KINDS:
                if mine := [one for one in scores if one.kind == kind]:
                    rows.append(row(budget, loss_of(kind, mine)))
    print("\n".join(lines(rows)))
    if options.out is not None:
        about = f"`measure --recorded` and audits, {options.requests} requests, {options.policy}"
        found = {**origin, **used(), "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        text = [f"# Recorded answers and audits\n\n{sentence(found, about)}\n", *lines(rows)]
        options.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
