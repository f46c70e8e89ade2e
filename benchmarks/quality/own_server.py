"""The servers that the benchmark starts itself, and what they say they evicted."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.options import POOLED, Options, OwnOptions
from benchmarks.server import Server
from vllm_kvevict.config.names import PYRAMIDS

BLOCK_SIZE = 32
NO_PROFILE = "none"
LAYERS = "layers"
"""Name of the variant with measured shares of layers."""
KVPRESS_POOLING = ("--kv-eviction-options", '{"pool": "avg", "pool_kernel": 5}')


@dataclass(frozen=True)
class Variant:
    """A server configuration. ``labels`` maps a row of the table to the policy it asks for."""

    name: str
    flags: tuple[str, ...]
    labels: dict[str, str]

    @property
    def has_groups(self) -> bool:
        """True if layers have budgets of their own. Each group then counts the tokens it evicts."""
        return self.name == LAYERS or not PYRAMIDS.isdisjoint(self.labels.values())


def variants(options: Options) -> list[Variant]:
    """The server's defaults; the same with kvpress's pooling; the same with shares of layers."""
    labels = {policy: policy for policy in options.policies}
    chosen = [Variant("default", (), labels)] if labels else []
    pooled = {f"{policy}, avg 5": policy for policy in options.policies if policy in POOLED}
    if options.like_for_like and pooled and options.base_url is None:
        chosen.append(Variant("avg5", KVPRESS_POOLING, pooled))
    if options.layers and options.base_url is None:
        shared = {f"{policy}, layers": policy for policy in options.layers_policies}
        chosen.append(Variant(LAYERS, profile_flags(options), shared))
    return chosen


def profile_flags(options: OwnOptions) -> tuple[str, ...]:
    """Arguments of a server with ``--layers``: its profile, groups, and ``--server-args``.

    Without a profile there are no groups.
    """
    flags: tuple[str, ...] = ()
    if options.layers not in (None, NO_PROFILE):
        flags += "--kv-eviction-profile", str(options.layers)
        if options.groups:
            flags += "--kv-eviction-options.groups", str(options.groups)
    return flags + tuple(shlex.split(options.server_args))


def server_key(options: OwnOptions, model: Path, flags: tuple[str, ...]) -> str:
    """Return the model, type, sizes and flags of a server, for the keys of a journal."""
    sizes = [str(options.window), str(options.block_size)]
    return " ".join([model.name, options.dtype, *sizes, *flags])


def start(options: OwnOptions, variant: Variant, model: Path) -> Server:
    """A server of ``variant``, to be entered."""
    args = [
        "--dtype", options.dtype, "--enforce-eager",
        "--block-size", str(options.block_size or BLOCK_SIZE),
        "--kv-cache-memory-bytes", options.kv_memory, "--max-num-seqs", str(options.concurrency),
        "--max-num-batched-tokens", "4096", "--enable-prefix-caching", "--seed", "0",
        "--no-enable-log-requests", "--disable-uvicorn-access-log",
        "--kv-eviction", next(iter(variant.labels.values())), "--kv-eviction-budget", "50%",
        "--kv-eviction-window", str(options.window),
        "--kv-eviction-allow", ",".join([*dict.fromkeys(variant.labels.values()), "none"]),
        *variant.flags,
    ]  # fmt: skip
    env = {"OMP_NUM_THREADS": str(options.threads)}
    return Server(model, args, options.work / f"server-{variant.name}.log", env=env)
