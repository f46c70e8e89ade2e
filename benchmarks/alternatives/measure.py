"""One way to serve, measured: a server, its load, its answers."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.alternatives.answers import ask
from benchmarks.alternatives.options import sizes
from benchmarks.alternatives.ways import AUTO, Way
from benchmarks.decode_node import engine_args, kv_bytes
from benchmarks.load import Load, measure
from benchmarks.quality.endpoint import Endpoint
from benchmarks.quality.journal import Journal
from benchmarks.quality.prompt import Prompt
from benchmarks.server import Server, ServerFailed

OFFLOADED = "vllm:kv_offload_store_bytes_total"
START_S = 1800.0
"""Longest start in seconds. ``auto`` measures a model without a profile before it serves."""
_ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?[\w.]*(?:Error|Exception): (?P<reason>\S.*)",
    re.MULTILINE,
)
_GENERIC = "Engine core initialization failed"


def server_args(
    way: Way, args: argparse.Namespace, model: Path, auto_budget: str | None
) -> list[str]:
    """Return all flags of a server; those of memory and sizes are the same for every way.

    Only a float32 model with an FP8 cache gets half of the bytes: float32 stands for 16 bits, of
    which FP8 takes a half, not a quarter.
    """
    shape = sizes(args)
    num_bytes = kv_bytes(shape, model, args.memory)
    if args.dtype == "float32" and way.has_fp8_cache:
        num_bytes //= 2
    return engine_args(shape, num_bytes) + way.server_args(args.layers, auto_budget)


def reason(log: str) -> str | None:
    """Return the sentence of the first exception in a server's log; None if there is none."""
    found = (match["reason"].strip() for match in _ERROR.finditer(log))
    return next((text for text in found if not text.startswith(_GENERIC)), None)


def label(found: dict[str, float] | None, name: str) -> str | None:
    """Return the value of a label of an information metric, as :meth:`Endpoint.metrics` has it."""
    for labels in found or ():
        if match := re.search(rf'\b{name}="([^"]*)"', labels):
            return match[1]
    return None


def check_evictions(way: Way, counted: dict[str, int], requests: int, log: Path) -> None:
    """Compare a server's counters with what its requests must have caused.

    A preempted request evicts again, so a server may count more evictions than requests.

    Raises:
        RuntimeError: A request was not evicted, or a server evicted that must not.

    """
    done = counted["evictions_prefill"]
    if (way.policy is not None and done < requests) or (
        way.policy is None and counted["evictions"]
    ):
        raise RuntimeError(
            f"{way.key}: {done} of {requests} requests were evicted at the end of a prompt or at "
            f"their eviction point; {counted['evictions']} evictions; see {log}"
        )


def measure_way(
    way: Way,
    args: argparse.Namespace,
    model: Path,
    prompts: Sequence[Prompt],
    journal: Journal,
    auto_budget: str | None,
) -> dict[str, Any]:
    """Start a server, load it, ask it the questions if there are any, and end it.

    Returns:
        ``flags``, and either ``error`` (vLLM's build for this machine lacks what the way needs) or
        ``load``, ``answers`` if there are questions, ``budget`` and ``capacity_tokens``.

    Raises:
        RuntimeError: A request failed, the server did not evict or copy what it should have, or it
            did not start.

    """
    flags = server_args(way, args, model, auto_budget)
    log = args.work / f"{way.key}.log"
    server = Server(model, flags, log, timeout_s=START_S)
    try:
        server.__enter__()
    except ServerFailed:
        error = reason(log.read_text()) if way.build else None
        if error is None:
            raise
        return {"flags": flags, "error": error}
    try:
        return {"flags": flags} | _measured(way, args, model, prompts, journal, server)
    finally:
        server.stop()


def _measured(
    way: Way,
    args: argparse.Namespace,
    model: Path,
    prompts: Sequence[Prompt],
    journal: Journal,
    server: Server,
) -> dict[str, Any]:
    endpoint = Endpoint(server.url, server.model)
    server.warm_up()
    before = server.evictions()
    load = Load(args.prompt, args.output_tokens, args.requests, args.requests)
    row: dict[str, Any] = {"load": measure(server, model, load)}
    if row["load"]["failed"] or row["load"]["completed"] != args.requests:
        raise RuntimeError(f"{way.key}: requests failed: {row['load']}; see {server.log}")
    counted = _since(server, before)
    check_evictions(way, counted, args.requests, server.log)
    row["load"]["evictions"] = counted["evictions"]
    if way.offloads:
        row["load"]["offloaded_bytes"] = server.metric(OFFLOADED)
        if not row["load"]["offloaded_bytes"]:
            raise RuntimeError(f"{way.key}: nothing was copied to host memory; see {server.log}")
    if prompts:
        before = server.evictions()
        row["answers"], sent = ask(endpoint, prompts, way.policy is not None, args.clients, journal)
        check_evictions(way, _since(server, before), sent, server.log)
    size = label(endpoint.metrics("vllm:cache_config_info"), "kv_cache_size_tokens")
    row["capacity_tokens"] = int(size) if size and size.isdigit() else None
    row["budget"] = label(endpoint.metrics("vllm_kvevict:config_info"), "budget")
    if way == AUTO and row["budget"] is None:
        raise RuntimeError(f"{way.key}: /metrics does not name the budget; see {server.log}")
    return row


def _since(server: Server, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in server.evictions().items()}
