"""What one eviction costs on the CPU, stage by stage: PyTorch operations, no model.

    python -m benchmarks.eviction_cost

Random keys, values and queries in the shapes of SmolLM2-135M (30 layers, 9 query heads, 3 KV
heads of 64), in the layout of vLLM's CPU kernel for this machine. One request evicts after a
prefill of 2048 tokens, then again after 128 more. Policies take turns, so that ratios mean
something on a busy machine; the least of all rounds counts.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.provenance import provenance
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.page_values import PageValues
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.schedule.step_plan import Eviction, GroupEviction
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import eviction as eviction_pass
from vllm_kvevict.worker.cpu import measure_layout
from vllm_kvevict.worker.eviction import WorkerEviction

RESULT = Path(__file__).parent / "results" / "eviction_cost.json"
POLICIES = ("ada-snapkv", "ada-defensive", "snapkv", "defensive", "streaming-llm")
MORE = 128
"""Tokens between the two evictions."""

STAGES = {
    "read": [(LayerCache, "keys"), (LayerCache, "sequences")],
    "value shares": [(WorkerEviction, "_value_shares"), (PageValues, "keep")],
    "allocate": [(Adaptive, "pages"), (Uniform, "pages")],
    "select": [(eviction_pass, "select_tokens")],
    "copy": [(eviction_pass, "compact_index"), (PageLayout, "copy")],
}
"""What is timed inside an eviction. Scores are timed on each policy's scorer."""


class Request:
    """One request alone in a worker."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        bs, heads, size = args.block_size, args.kv_heads, args.head_size
        config = EvictionConfig(
            policy=POLICIES[0], allow=POLICIES, window=args.window, budget=args.budget
        )
        timeline = config.timeline(bs)
        names = [f"layer.{index}" for index in range(args.layers)]
        cpu, dtype = torch.device("cpu"), getattr(torch, args.dtype)
        self.state = GroupState(0, names, timeline, heads, 1, 2 * args.tokens, cpu)
        store, last = timeline.store_blocks(args.tokens), args.tokens + MORE
        blocks = blocks_for(last, bs)
        layout = _layout(bs, size, dtype)
        count = (1 + blocks + 2 * store) * heads
        caches = {
            name: LayerCache(torch.randn(count, 2 * bs * size).to(dtype), layout, size**-0.5, 0.0)
            for name in names
        }
        rings = ObservationRings(names, 1, args.window, args.query_heads, size, dtype, cpu)
        rings._queries.normal_()
        values = PageValues(caches, dict.fromkeys(names, heads), 1)
        rows: Any = SimpleNamespace(rows=lambda ids: np.array([0]))
        self.worker = WorkerEviction(
            build_policies(config), {0: self.state}, caches, rings, values, rows
        )
        positional = list(range(1, 1 + blocks))
        one, two = (
            list(range(1 + blocks + k * store, 1 + blocks + (k + 1) * store)) for k in (0, 1)
        )
        first, later = timeline.tail_start(args.tokens), timeline.tail_start(last)
        after_prefill = GroupEviction(
            group_id=0,
            old_tail_start=0,
            tail_start=first,
            old_store=[],
            store=one,
            positional=positional[: blocks_for(args.tokens, bs)],
        )
        in_decode = GroupEviction(
            group_id=0,
            old_tail_start=first,
            tail_start=later,
            old_store=one,
            store=two,
            positional=positional[first // bs :],
        )
        self._due = {"first": (args.tokens, after_prefill), "later": (last, in_decode)}

    def evict(self, policy: str) -> Iterator[tuple[str, dict[str, float]]]:
        """Milliseconds of each stage of the first eviction, then of the later one."""
        self.state.clear([0])
        scorer = type(self.worker.policies[policy].scorer)
        stages = STAGES | {"scores": [(scorer, "scores")]}
        for name, (tokens, group) in self._due.items():
            found: dict[str, float] = defaultdict(float)
            with ExitStack() as stack:
                for stage, parts in stages.items():
                    for owner, attribute in parts:
                        timed = _timed(getattr(owner, attribute), found, stage)
                        stack.enter_context(mock.patch.object(owner, attribute, timed))
                start = time.perf_counter()
                self.worker._evict(Eviction("a", tokens, 0, [group], policy, 0))
                found["all"] = 1e3 * (time.perf_counter() - start)
            found["rest"] = 2 * found["all"] - sum(found.values())
            yield name, dict(found)


def _timed(function: Callable, found: dict[str, float], stage: str) -> Callable:
    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        found[stage] += 1e3 * (time.perf_counter() - start)
        return result

    return timed


def _layout(block_size: int, head_size: int, dtype: torch.dtype) -> PageLayout:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, head_size)
    return measure_layout(block_size, head_size, dtype, dtype, isa)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(
        layers=30, query_heads=9, kv_heads=3, head_size=64, block_size=32, window=32,
        tokens=2048, budget=512, rounds=15, threads=2,
    ).items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reading.mean_of_ranks = eviction_pass.sum_of_ranks = lambda tensor: tensor
    reading.first_head = lambda num_heads: 0
    request = Request(args)
    best: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for _ in range(args.rounds):
        for policy in POLICIES:
            for name, stages in request.evict(policy):
                if (
                    stages["all"] < best[policy].get(name, stages)["all"]
                    or name not in best[policy]
                ):
                    best[policy][name] = stages
    result = {"provenance": provenance(), "milliseconds": best}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for policy, evictions in best.items():
        for name, stages in evictions.items():
            shown = ", ".join(f"{stage} {took:.1f}" for stage, took in sorted(stages.items()))
            print(f"{policy:14} {name}: {shown}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
