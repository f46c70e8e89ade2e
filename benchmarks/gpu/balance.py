"""How evenly schedules of decode attention load a GPU, simulated: no kernel runs.

``python -m benchmarks.gpu.balance``. A layer's keys are cut as ``ops/triton/splits.py`` cuts them,
and each program reads its splits one after another at one speed. Balance is the time of a perfect
schedule over that of the program that ends last: the share of the bandwidth that is used.
"""

import argparse
import heapq
import json
from pathlib import Path

import torch

from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.heads import page_split
from benchmarks.provenance import provenance
from vllm_kvevict.attention.scratch import SMALLEST_SPLIT, SPLITS_PER_PROGRAM
from vllm_kvevict.ops.triton.splits import TILE


def cut(lengths: list[int], target: int) -> list[int]:
    """Keys of every split in order, in whole tiles, as a program reads them."""
    size = -(-sum(lengths) // target)
    size = max(SMALLEST_SPLIT, -(-size // TILE) * TILE)
    found = []
    for length in lengths:
        full, rest = divmod(length, size)
        found += [size] * full + [-(-rest // TILE) * TILE] * (rest > 0)
    return found


def dealt(splits: list[int], programs: int) -> int:
    """Keys of the longest program where split s is that of program ``s % programs``."""
    return max(sum(splits[program::programs]) for program in range(programs))


def queued(splits: list[int], programs: int) -> int:
    """The same where a program that is done takes the next split."""
    loads = [0] * programs
    for split in splits:
        heapq.heapreplace(loads, loads[0] + split)
    return max(loads)


def lengths(requests: int, args: argparse.Namespace) -> list[int]:
    """Cached tokens of every head of a step."""
    rand = torch.Generator().manual_seed(args.seed)
    pages = page_split(requests, args.heads, args.budget // args.block_size, rand).diff(dim=1)
    return (pages * args.block_size + args.tail).flatten().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers, default=[16, 64, 128, 256, 512, 1024])
    parser.add_argument("--splits", type=numbers, default=[SPLITS_PER_PROGRAM, 4, 8])
    parser.add_argument("--programs", type=int, default=3 * 132, help="that run at once")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=96)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "balance.json")
    args = parser.parse_args()
    rows = []
    for requests in args.batches:
        found = lengths(requests, args)
        for each in args.splits:
            splits = cut(found, args.programs * each)
            ideal = sum(splits) / args.programs
            row = {
                "requests": requests,
                "splits per program": each,
                "splits": len(splits),
                "round robin": ideal / dealt(splits, args.programs),
                "queue": ideal / queued(splits, args.programs),
                "queue, longest first": ideal / queued(sorted(splits)[::-1], args.programs),
            }
            rows.append({name: round(value, 3) for name, value in row.items()})
            print(*rows[-1].values(), sep="\t")
    settings = {key: str(value) for key, value in vars(args).items()}
    content = {"settings": settings, "rows": rows, "provenance": provenance()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
