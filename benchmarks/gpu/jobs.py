"""What each server of part 3 is asked, with estimates of the time that it takes on an H100."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.client import SPREAD, Load
from benchmarks.gpu.model import ring_bytes, token_bytes
from benchmarks.gpu.part import Key
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import AUTO

START_S = 75
"""Weights, compilation, graphs; of a first server, later ones take less (``--start``)."""
BENCH_S = 2
"""Of the client: prompts, connections."""
PREFILL_TOKENS_PER_S = 27_000
"""Of a prompt of 32,768 tokens on an H100; one of 6,000 took 55,000."""
WEIGHTS_S = 0.0055
"""Of a decode step, without attention."""
CACHE_BYTES_PER_S = 2.6e12
SLACK = 64
"""Tokens of room in the longest sequence."""

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


@dataclass(frozen=True)
class Variant:
    """How a server evicts: suffixes of its row's setting and of its name, policy, further flags."""

    setting: str
    name: str
    policy: str
    flags: tuple[str, ...] = ()


def variants(args: argparse.Namespace) -> list[Variant]:
    """The first policy, the same with shorter steps, then the other policies."""
    first, *others = args.policies
    found = [Variant("", "", first)]
    for tokens in args.steps:
        flags = ("--max-num-batched-tokens", str(tokens))
        found.append(Variant(f", steps of {tokens}", f"-steps-{tokens}", first, flags))
    return found + [Variant(f", {policy}", f"-{policy}", policy) for policy in others]


def policy_flags(policy: str, args: argparse.Namespace) -> list[str]:
    """The flags of a policy, up to the budget's value; ``auto`` has a profile of random probes."""
    profile = ["--kv-eviction-profile", str(profile_path(args))] if policy == AUTO else []
    return ["--kv-eviction", policy, *profile, "--kv-eviction-budget"]


def profile_path(args: argparse.Namespace) -> Path:
    return args.scratch / "profile.json"


def seconds(load: Load, at_once: int, kept_bytes: int) -> float:
    """An estimate for a load of which so many prompts run at once, with a cache of so much."""
    step = WEIGHTS_S + kept_bytes / CACHE_BYTES_PER_S
    prefill = load.num_prompts * load.input_len / PREFILL_TOKENS_PER_S
    waves = max(load.num_prompts / at_once, 1 + SPREAD)
    return BENCH_S + prefill + waves * load.output_len * step


def services(args: argparse.Namespace, config: dict[str, Any]) -> list[Service]:
    """The servers, the longest loads first; the largest stock server also has room for all.

    An evicting server's rings are taken from its KV cache: both have the same memory in all.
    """
    per_token, window = token_bytes(config), EvictionConfig.model_fields["window"].default
    rings = ring_bytes(config, args.max_num_seqs, window)
    flags = {name: policy_flags(name, args) for name in args.policies}
    found: list[Service] = []
    ordered = sorted(args.loads, key=lambda load: -load[0] * load[3])
    for prompt, output, held, total in ordered:
        load = Load(prompt, output, total, total)
        memory, longest = held * (prompt + output) * per_token, prompt + load.longest_output + SLACK
        case = dict(case="memory-bound", input=prompt, output=output)
        stock = Job(case | dict(setting="stock"), load, seconds(load, held, memory))
        found.append(Service(f"stock-{prompt}", memory, longest, [], [stock]))
        for share in args.shares:
            ratio = 100 / share
            at_once = min(total, int(held * ratio))
            kept = int(at_once * memory / held / ratio)
            needed = seconds(load, at_once, kept)
            for variant in variants(args):
                key = case | dict(setting=f"{ratio:g}x{variant.setting}", policy=variant.policy)
                chosen = [*flags[variant.policy], f"{share:g}%", *variant.flags]
                name = f"{ratio:g}x-{prompt}{variant.name}"
                job = Job(key, load, needed)
                found.append(Service(name, memory - rings, longest, chosen, [job]))
    _room_for_all(found, args, per_token, flags[args.policies[0]])
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
    longest = max(prompt + 2 * output, *args.prefills) + SLACK
    room = next((s for s in found if s.kv_bytes >= needed and s.longest >= longest), None)
    if room is None or room.eviction:
        room = Service("stock-room", needed + longest * per_token, longest, [])
        found.append(room)
    for length in args.prefills:
        key = dict(case="prefill", input=length, output=1, setting="stock")
        room.jobs.append(Job(key, None, 6 * length / PREFILL_TOKENS_PER_S))
    nothing = [*policy, str(2 * (prompt + 2 * output))]
    beside = Service("nothing-to-evict", room.kv_bytes, room.longest, nothing)
    found.append(beside)
    for setting, service in {"stock": room, "nothing to evict": beside}.items():
        for number in range(args.repeats):
            load = Load(prompt, output, args.few, args.few, seed=number + 1)
            key = dict(case="not memory-bound", input=prompt, output=output, setting=setting)
            key["load"] = number + 1
            service.jobs.append(Job(key, load, seconds(load, args.few, kept)))
