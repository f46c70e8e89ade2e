"""Part 1: decode attention with uneven heads, as the graphs of a server run it.

``python -m benchmarks.gpu.attention --help``. A CUDA graph holds a step: the plan of all layers,
then in each layer its ring writes and its attention, over caches of its own. Times are those of a
layer, a share of the whole. On a CPU (``--device cpu``, tiny sizes, under TRITON_INTERPRET=1) it
tries the script, without a graph; FlashAttention is left out there.
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.calls import flash_equal, flash_per_head, memory_efficient
from benchmarks.gpu.clock import captured, copy_bandwidth, milliseconds, spread
from benchmarks.gpu.heads import Step
from benchmarks.gpu.part import Key, Part, add_options
from vllm_kvevict.attention.choice import choose
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.attention.xformers.kernel import GATHERED
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.fp8 import CACHE_DTYPES

RESULTS = Path("benchmarks/results/gpu")
BATCHES = (1, 16, 64, 256)
BUDGETS = (512, 1024, 4096)
TRITON, FLASH = "triton", "flash per head"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    """Numbers with fractions, separated by commas."""
    return [float(item) for item in text.split(",")]


def served(step: Step) -> str:
    """The kernel that a server runs under ``--kv-eviction-attention auto``."""
    shape = step.shape
    # What the rule asks of a server's configuration, for a model of these shapes.
    model = SimpleNamespace(
        dtype=step.dtype,
        get_head_size=lambda: shape.head_size,
        hf_text_config=SimpleNamespace(to_dict=dict, model_type="llama"),
    )
    server: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=CACHE_DTYPES[0] if shape.fp8 else "auto"),
        attention_config=SimpleNamespace(flash_attn_version=None),
    )
    kernel, _ = choose(server, EvictionConfig(policy="snapkv"))
    own = Scratch(kernel, shape, torch.device("meta")).by_slices(step.requests)
    return TRITON if own else FLASH


def runs(step: Step) -> dict[str, Callable[[], object]]:
    """Whole steps; the first is our kernel's."""
    found: dict[str, Callable[[], object]] = {TRITON: step.run_triton}
    if step.device.type == "cuda":
        found[FLASH] = flash_per_head(step)
        found["flash, longest first"] = flash_per_head(step, longest_first=True)
        found["flash, equal lengths"] = flash_equal(step)
        capability = torch.cuda.get_device_capability(step.device)
        if capability <= GATHERED[1] and importlib.util.find_spec("xformers"):
            found["xformers on pages"] = memory_efficient(step, True)
            found["xformers, gathered"] = memory_efficient(step, False)
    return found


def row(args: argparse.Namespace, requests: int, budget: int) -> dict[str, Any]:
    """Times of a layer, and of reading its keys and values at the bandwidth of a copy."""
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device, args.copy_bytes)
    longest = max(args.max_model_len, 8 * budget + args.tail)
    shape = Shape(args.heads, args.group, args.head_size, args.block_size, requests, longest)
    dtype = getattr(torch, args.dtype)
    step = Step(
        requests, budget, args.tail, shape, dtype, device, sigma=args.sigma, layers=args.layers
    )
    figures: dict[str, Any] = {
        "copy_gb_per_s": bandwidth / 1e9,
        "bytes": step.num_bytes,
        "floor_ms": step.num_bytes / bandwidth * 1000,
        "served by": served(step),
    }

    def timed(run: Callable[[], object], parts: int) -> dict[str, float]:
        return spread(milliseconds(run, device, args.repeats), parts)

    figures["plan of a step"] = timed(captured(step.plan, device), 1)
    for name, run in runs(step).items():
        try:
            graph = run if name.startswith("xformers") else captured(run, device)
            figures[name] = timed(graph, step.layers)
        except Exception as error:
            if name == figures["served by"]:
                raise
            figures[f"{name}: error"] = f"{type(error).__name__}: {error}"[:500]
    return figures


def seconds(args: argparse.Namespace, key: Key) -> float:
    """An estimate for a row: compiling and tensors, then the steps at a third of 3 TB/s."""
    tokens = key["requests"] * args.heads * (key["budget"] + args.tail)
    step = tokens * 2 * args.head_size * 2 * args.layers / 1e12
    return 6 + 3 * args.repeats * (step + 0.015)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS))
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--tail", type=int, default=96, help="tokens in the tail")
    parser.add_argument(
        "--sigma",
        type=float,
        default=1.0,
        help="spread of the heads' shares: standard deviation of their logarithm",
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--copy-bytes", type=int, default=4 * 2**30)
    add_options(parser, RESULTS / "attention.json")
    args = parser.parse_args()
    part = Part("attention", args, torch.device(args.device), choice=("batches", "budgets"))
    # The verdicts' batches first: the time may be short.
    batches = sorted(args.batches, key=lambda requests: -requests)
    keys = [dict(requests=r, budget=budget) for r in batches for budget in args.budgets]
    part.measure(keys, lambda key: seconds(args, key), lambda key: row(args, **key))
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
