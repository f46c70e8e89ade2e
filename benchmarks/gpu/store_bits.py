"""Decode attention over stores in four and eight bits, against stores in the cache's type.

``python -m benchmarks.gpu.store_bits --help``. For each batch and budget the step runs with stores
in 16 bits, then with stores in few bits of equal bytes, which hold 3.75 or 1.875 times the tokens,
and of about equal tokens. Times are those of a layer in a captured graph of a whole step, ring
writes included. On a CPU (``--device cpu``, tiny sizes, under TRITON_INTERPRET=1) it tries the
script.
"""

import argparse
from typing import Any

import torch

from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.clock import captured, copy_bandwidth, milliseconds, spread
from benchmarks.gpu.heads import Step
from benchmarks.gpu.part import Key, Part, add_options
from vllm_kvevict.attention.scratch import Shape
from vllm_kvevict.ops.token_format import AS_CACHED, INT4, INT8

FORMATS = {"16 bits": AS_CACHED, "int4": INT4, "int8": INT8}


def budgets(args: argparse.Namespace, budget: int) -> dict[tuple[str, str], int]:
    """Tokens of a head in the store, by format and by what is equal to 16 bits."""
    found = {("16 bits", "all"): budget}
    for name, stored in FORMATS.items():
        if not stored.as_cached:
            size = stored.page_tokens(args.block_size)
            found[name, "bytes"] = budget // args.block_size * size
            found[name, "tokens"] = max(1, round(budget / size)) * size
    return found


def row(args: argparse.Namespace, requests: int, budget: int) -> dict[str, Any]:
    """Times of a layer, and its bytes over the bandwidth of a copy, of each way."""
    device, figures = torch.device(args.device), {}
    bandwidth = copy_bandwidth(device, args.copy_bytes)
    for (name, equal), tokens in budgets(args, budget).items():
        shape = Shape(
            args.heads,
            args.group,
            args.head_size,
            args.block_size,
            requests,
            8 * tokens + args.tail,
        )
        step = Step(
            requests,
            tokens,
            args.tail,
            shape,
            getattr(torch, args.dtype),
            device,
            layers=args.layers,
            cache_bytes=args.cache_bytes,
            stored=FORMATS[name],
        )
        times = milliseconds(captured(step.run_triton, device), device, args.repeats)
        measured = spread(times, step.layers)
        floor = step.num_bytes / bandwidth * 1000
        figures[f"{name}, equal {equal}"] = measured | {
            "tokens": tokens,
            "bytes": step.num_bytes,
            "floor_ms": floor,
        }
        del step
    return {"copy_gb_per_s": bandwidth / 1e9} | figures


def seconds(args: argparse.Namespace, key: Key) -> float:
    """An estimate for a row: compiling and tensors, then the steps at a sixth of 3 TB/s."""
    tokens = key["requests"] * args.heads * (key["budget"] + args.tail)
    step = tokens * 2 * args.head_size * 2 * args.layers / 5e11
    return 15 + 5 * args.repeats * (step + 0.015)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers, default=[16, 64])
    parser.add_argument("--budgets", type=numbers, default=[1024, 4096])
    parser.add_argument("--tail", type=int, default=96, help="tokens in the tail")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--copy-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--cache-bytes", type=int, default=8 * 2**30)
    add_options(parser, RESULTS / "store_bits.json")
    args = parser.parse_args()
    part = Part("store_bits", args, torch.device(args.device), choice=("batches", "budgets"))
    keys = [dict(requests=r, budget=budget) for r in args.batches for budget in args.budgets]
    part.measure(keys, lambda key: seconds(args, key), lambda key: row(args, **key))
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
