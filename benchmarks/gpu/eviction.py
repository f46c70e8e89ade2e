"""Part 2: one request's eviction pass, kernel by kernel, with the shapes of Llama-3.1-8B.

``python -m benchmarks.gpu.eviction --help``. The CUDA kernels need the extension. ``--device cpu``
runs only the worker's pass, to try the script. Under ``probe`` and ``ada-probe`` every head has
random probes and a network.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.clock import copy_bandwidth, milliseconds, spread
from benchmarks.gpu.dummy_profile import random_probes
from benchmarks.gpu.part import Key, Part, add_options
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import WindowLayers, window_scores
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import floats_per_token
from vllm_kvevict.rules.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import probes as probing
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.fused import FusedEvictions
from vllm_kvevict.worker.gpu import interleaved
from vllm_kvevict.worker.probes import LayerProbe, Probes

PASS = "the worker's pass"
WITHOUT_NETWORKS = "the pass without networks"


class Pass:
    """The tensors of an eviction after the prefill of ``prompt`` tokens."""

    def __init__(self, prompt: int, args: argparse.Namespace, device: torch.device) -> None:
        page = args.block_size
        self.args, self.device = args, device
        self.store_blocks = (args.budget - args.window) // page
        self.tail_start = (prompt - args.window) // page * page
        positional = -(-prompt // page)
        blocks = positional + self.store_blocks + 1
        ids = (torch.randperm(blocks - 1) + 1).tolist()
        dtype = getattr(torch, args.dtype)
        cache = (blocks, args.heads, page, 2 * args.head_size)
        self.caches = [torch.randn(cache, dtype=dtype, device=device) for _ in range(args.layers)]
        query = (args.window, args.heads * args.group, args.head_size)
        self.rings = [torch.randn(query, dtype=dtype, device=device) for _ in self.caches]
        self.due = Due(
            row=0, ring=0, num_tokens=prompt, old_tail_start=0, tail_start=self.tail_start,
            old_store_blocks=0, positional=ids[:positional], store=ids[positional:],
        )  # fmt: skip
        self.indptr = torch.zeros(args.layers, 1, args.heads + 1, dtype=torch.int32, device=device)
        self.old_store = torch.zeros(1, 1, dtype=torch.int32, device=device)

    @property
    def key_bytes(self) -> int:
        """Keys of the candidates and of the window, all layers."""
        tokens = self.due.num_tokens * self.args.layers * self.args.heads
        return tokens * self.args.head_size * self.caches[0].element_size()

    @property
    def copied_bytes(self) -> int:
        """Survivors, read and written."""
        tokens = self.store_blocks * self.args.block_size * self.args.layers * self.args.heads
        return 2 * tokens * 2 * self.args.head_size * self.caches[0].element_size()

    def kernels(self) -> dict[str, Callable[[], object]]:
        """Operations on CUDA; each after the first takes the results of those before."""
        args = self.args
        batch = EvictionBatch.build(
            [self.due], args.layers, args.heads, args.block_size, args.window, self.device
        )
        scale = args.head_size**-0.5
        layers = WindowLayers(
            self.caches, self.rings, [scale] * args.layers, self.indptr, self.old_store
        )
        scores = window_scores(batch, layers)
        rows = candidate_rows(batch, self.indptr)
        pages = batch_pages(batch, scores, rows, 0.2)
        columns = batch_columns(batch, scores, pages, rows)
        return {
            "score": lambda: window_scores(batch, layers),
            "rows": lambda: candidate_rows(batch, self.indptr),
            "allocate": lambda: batch_pages(batch, scores, rows, 0.2),
            "select": lambda: batch_columns(batch, scores, pages, rows),
            "compact": lambda: compact(
                self.caches, columns, pages, batch, self.indptr, self.old_store
            ),
        }

    def worker(self, fused: bool, networks: bool = True) -> Callable[[], object]:
        """The whole pass as the worker runs it, with or without the kernels and the networks."""
        args, names = self.args, [f"layer.{index}" for index in range(self.args.layers)]
        config = EvictionConfig(policy=args.policy, budget=args.budget, window=args.window)
        state = GroupState(
            0, names, config.rule(args.block_size), args.heads, 1, self.due.num_tokens,
            self.device,
        )  # fmt: skip
        layout = interleaved(args.block_size, args.head_size)
        size, scale = 2 * args.block_size * args.head_size, args.head_size**-0.5
        caches = {
            name: LayerCache(cache.view(-1, size), layout, scale, 0.0)
            for name, cache in zip(names, self.caches, strict=True)
        }
        queries = (args.heads * args.group, args.head_size, self.rings[0].dtype, self.device)
        rings = ObservationRings(names, 1, args.window, *queries)
        for name, ring in zip(names, self.rings, strict=True):
            rings.layer(name).copy_(ring)
        # One rank: vLLM's tensor-parallel group, which nobody has made, is not asked.
        reading.first_head = lambda num_heads: 0
        for module in (reading, fused_pass, probing):
            module.sum_of_ranks = lambda tensor: tensor
        rows = SimpleNamespace(
            rows=lambda request_ids: np.zeros(1, dtype=np.int64),
            positions=lambda request, start, stop: torch.arange(start, stop),
        )
        policies, states = build_policies(config), {0: state}
        channels = floats_per_token(config)
        values = (
            TokenStats(caches, dict.fromkeys(names, args.heads), channels) if channels else None
        )
        probes = None
        if "probe" in args.policy:
            assert values is not None
            weights = random_probes(args.layers, args.heads, args.head_size)
            weights = weights if networks else replace(weights, network=None)
            heads = list(range(args.heads))
            layers = {
                name: LayerProbe.of(weights, depth, heads, channels, None, self.device)
                for depth, name in enumerate(names)
            }
            probes = Probes(layers, caches, values)
        kernels = None
        if fused:
            longest = self.due.num_tokens
            kernels = FusedEvictions(policies, states, caches, rings, values, longest, probes)
        made = WorkerEviction(policies, states, caches, rings, values, rows, kernels, None, probes)
        due = self.due
        group = GroupEviction(0, 0, due.tail_start, [], list(due.positional), list(due.store))
        eviction = Eviction("a", due.num_tokens, 0, [group], config.policy)

        def run() -> None:
            state.clear([0])
            if fused:
                made._evict_fused(config.policy, [eviction])
            else:
                made._evict(eviction)

        return run


def row(args: argparse.Namespace, policy: str, ranks: int, prompt: int) -> dict[str, Any]:
    """Times of the pass, and of its bytes at the bandwidth of a copy."""
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device, args.copy_bytes)
    heads = max(1, args.heads // ranks)
    case = Pass(prompt, argparse.Namespace(**vars(args) | dict(heads=heads, policy=policy)), device)
    moved = case.key_bytes + case.copied_bytes
    figures: dict[str, Any] = {
        "copy_gb_per_s": bandwidth / 1e9,
        "bytes": moved,
        "floor_ms": moved / bandwidth * 1000,
    }
    runs: dict[str, Callable[[], object]] = {}
    if device.type == "cuda":
        runs[PASS] = case.worker(fused=True)
        # One by one the kernels are those of the policies that score like SnapKV.
        runs |= case.kernels() if "snapkv" in policy else {}
        if "probe" in policy:
            runs[WITHOUT_NETWORKS] = case.worker(fused=True, networks=False)
    runs["PyTorch pass"] = case.worker(fused=False)
    for name, run in runs.items():
        # It is shown, not judged, and may take seconds.
        repeats = max(3, args.repeats // 4) if name == "PyTorch pass" else args.repeats
        figures[name] = spread(milliseconds(run, device, repeats))
    return figures


def seconds(key: Key) -> float:
    """An estimate for a row: tensors, compiling, and most of all the PyTorch pass."""
    return 5 + 10 * key["prompt"] / 131072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=numbers, default=[4096, 32768, 131072])
    parser.add_argument("--ranks", type=numbers, default=[1, 8], help="among which heads are split")
    parser.add_argument("--policies", type=lambda text: text.split(","),
                        default=["ada-snapkv", "ada-defensive"])  # fmt: skip
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--copy-bytes", type=int, default=4 * 2**30)
    add_options(parser, RESULTS / "eviction.json")
    args = parser.parse_args()
    choice = ("policies", "ranks", "prompts")
    part = Part("eviction", args, torch.device(args.device), choice)
    grid = product(args.policies, args.ranks, args.prompts)
    keys = [dict(policy=policy, ranks=ranks, prompt=prompt) for policy, ranks, prompt in grid]
    part.measure(keys, seconds, lambda key: row(args, **key))
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
