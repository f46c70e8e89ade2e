"""What each server of part 3 is asked, with estimates of the time that it takes on an H100."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.model import ring_bytes, token_bytes
from benchmarks.gpu.part import Key
from benchmarks.load import Load
from vllm_kvevict.config.config import EvictionConfig

START_S = 75
"""Weights, compilation, graphs; of a first server, later ones take less."""
BENCH_S = 10
PREFILL_TOKENS_PER_S = 16_000
WEIGHTS_S = 0.0055
"""Of a decode step, without attention."""
CACHE_BYTES_PER_S = 2.6e12
SLACK = 64
"""Tokens that ``vllm bench serve`` may send beyond a prompt's length."""

Shape = tuple[int, int, int, int]
"""Input and output tokens, prompts that stock vLLM's memory holds, prompts in all."""


@dataclass(frozen=True)
class Job:
    """One row. ``load`` is None for a prefill of ``key["input"]`` tokens."""

    key: Key
    load: Load | None
    seconds: float


@dataclass
class Service:
    """One server: KV-cache bytes, longest sequence, flags of eviction, and what it is asked."""

    name: str
    kv_bytes: int
    longest: int
    eviction: list[str]
    jobs: list[Job] = field(default_factory=list)


def seconds(load: Load, at_once: int, kept_bytes: int) -> float:
    """An estimate for a load of which so many prompts run at once, with a cache of so much."""
    step = WEIGHTS_S + kept_bytes / CACHE_BYTES_PER_S
    prefill = load.num_prompts * load.input_len / PREFILL_TOKENS_PER_S
    waves = -(-load.num_prompts // at_once)
    return BENCH_S + prefill + waves * load.output_len * step


def services(args: argparse.Namespace, config: dict[str, Any]) -> list[Service]:
    """The servers, the longest loads first; the largest stock server also has room for all.

    An evicting server's rings are taken from its KV cache: both have the same memory in all.
    """
    per_token, window = token_bytes(config), EvictionConfig.model_fields["window"].default
    rings = ring_bytes(config, args.max_num_seqs, window)
    policy = ["--kv-eviction", args.policy, "--kv-eviction-budget"]
    found: list[Service] = []
    ordered = sorted(args.loads, key=lambda load: -load[0] * load[3])
    for prompt, output, held, total in ordered:
        memory, longest = held * (prompt + output) * per_token, prompt + output + SLACK
        load = Load(prompt, output, total, total)
        case = dict(case="memory-bound", input=prompt, output=output)
        stock = Job(case | dict(setting="stock"), load, seconds(load, held, memory))
        found.append(Service(f"stock-{prompt}", memory, longest, [], [stock]))
        for share in args.shares:
            ratio = 100 / share
            at_once = min(total, int(held * ratio))
            kept = int(at_once * memory / held / ratio)
            job = Job(case | dict(setting=f"{ratio:g}x"), load, seconds(load, at_once, kept))
            flags = [*policy, f"{share:g}%"]
            name = f"{ratio:g}x-{prompt}"
            found.append(Service(name, memory - rings, longest, flags, [job]))
    _room_for_all(found, args, per_token, policy)
    for service in found:
        service.jobs.sort(key=lambda job: job.seconds)
    return found


def _room_for_all(
    found: list[Service], args: argparse.Namespace, per_token: int, policy: list[str]
) -> None:
    """Prefills, and loads beside a budget that no prompt reaches: what the plugin itself costs."""
    prompt, output = min(args.loads)[:2]
    kept = args.few * (prompt + output) * per_token
    needed = max(kept, max(args.prefills) * per_token)
    longest = max(prompt + output, *args.prefills) + SLACK
    room = next((s for s in found if s.kv_bytes >= needed and s.longest >= longest), None)
    if room is None or room.eviction:
        room = Service("stock-room", needed + longest * per_token, longest, [])
        found.append(room)
    for length in args.prefills:
        key = dict(case="prefill", input=length, output=1, setting="stock")
        room.jobs.append(Job(key, None, 6 * length / PREFILL_TOKENS_PER_S))
    nothing = [*policy, str(2 * (prompt + output))]
    beside = Service("nothing-to-evict", room.kv_bytes, room.longest, nothing)
    found.append(beside)
    for setting, service in {"stock": room, "nothing to evict": beside}.items():
        for number in range(args.repeats):
            load = Load(prompt, output, args.few, args.few, seed=number + 1)
            key = dict(case="not memory-bound", input=prompt, output=output, setting=setting)
            key["load"] = number + 1
            service.jobs.append(Job(key, load, seconds(load, args.few, kept)))
