"""How evenly schedules of decode attention load a GPU, simulated: no kernel runs.

``python -m benchmarks.gpu.balance``. A layer's keys are cut and queued as ``ops/triton/splits.py``
does it, and each program reads its splits one after another, all at one speed. Balance is the time
of a perfect schedule over that of the program that ends last: the share of the bandwidth that is
used. Partial sums, which splits of one sequence write and the last of them reads, count as bytes
that a perfect schedule lacks. With ``--latency``, times are those of a perfect schedule to which
each split adds a constant: the loads with which it begins.
"""

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch

from benchmarks.gpu.attention import RESULTS, floats, numbers
from benchmarks.gpu.heads import page_split
from benchmarks.provenance import provenance
from vllm_kvevict.attention.scratch import MIN_SPLIT, splits_to_fill
from vllm_kvevict.ops.triton.splits import CLASSES, STEP

TENTHS = 10


@dataclass(frozen=True)
class Costs:
    """Bytes of one cached token of one head, and of one split's partial sums."""

    token: int
    partial: int

    @classmethod
    def of(cls, group: int, head_size: int, itemsize: int) -> "Costs":
        # Written and read, float32, with two numbers for each query head beside the sums.
        return cls(2 * head_size * itemsize, 2 * group * (head_size + 2) * 4)


Split = tuple[int, int]
"""Its keys, and the splits of its sequence."""


def cut(lengths: Sequence[int], target: int) -> list[list[Split]]:
    """The splits of every sequence in order."""
    size = -(-sum(lengths) // target)
    size = max(MIN_SPLIT, -(-size // STEP) * STEP)
    found = []
    for length in lengths:
        count = max(1, -(-length // size))
        found.append([(size, count)] * (count - 1) + [(length - (count - 1) * size, count)])
    return found


def queue(sequences: Sequence[Sequence[Split]]) -> list[Split]:
    """Longest first: all but the last of each sequence, then the last ones by class."""
    size = max(split[0] for mine in sequences for split in mine)
    last = sorted((mine[-1] for mine in sequences), key=lambda x: -(x[0] * (CLASSES - 1) // size))
    return [split for mine in sequences for split in mine[:-1]] + last


def num_bytes(split: Split, costs: Costs) -> int:
    keys, splits = split
    return keys * costs.token + (costs.partial if splits > 1 else 0)


def dealt(splits: Sequence[Split], programs: int, costs: Costs) -> list[list[int]]:
    """Bytes of the splits of each program where split s is that of program ``s % programs``."""
    return [[num_bytes(one, costs) for one in splits[p::programs]] for p in range(programs)]


def taken(splits: Sequence[Split], programs: int, costs: Costs) -> list[list[int]]:
    """The same where a program that is done takes the next split."""
    mine: list[list[int]] = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for one in splits:
        when, program = free[0]
        mine[program].append(num_bytes(one, costs))
        heapq.heapreplace(free, (when + mine[program][-1], program))
    return mine


def by_tenths(mine: Sequence[Sequence[int]], multiprocessors: int) -> list[float]:
    """In each tenth of the time, the bytes of the multiprocessor that reads least over the most.

    Program p runs on multiprocessor ``p % multiprocessors``.
    """
    end = max(sum(splits) for splits in mine)
    found = []
    for begin, until in pairwise(end * tenth / TENTHS for tenth in range(TENTHS + 1)):
        read = [
            sum(max(0.0, min(until, sum(one)) - begin) for one in mine[m::multiprocessors])
            for m in range(multiprocessors)
        ]
        found.append(round(min(read) / max(read), 3))
    return found


def lengths(requests: int, sigma: float, args: argparse.Namespace) -> list[int]:
    """Cached tokens of every head of a step. The shares of heads are log-normal."""
    rand = torch.Generator().manual_seed(args.seed)
    blocks = args.budget // args.block_size
    pages = page_split(requests, args.heads, blocks, rand, sigma=sigma).diff(dim=1)
    return (pages * args.block_size + args.tail).flatten().tolist()


def balance(mine: Sequence[Sequence[int]], ideal: float) -> float:
    """Share of the time of the longest program in which a perfect schedule would be done."""
    return round(ideal / len(mine) / max(sum(splits) for splits in mine), 3)


def slowdown(
    splits: Sequence[Split], programs: int, costs: Costs, ideal: float, late: int
) -> float:
    """Time of the queue over a perfect schedule's, if each split costs ``late`` bytes more."""
    free = [0] * programs
    for one in splits:
        heapq.heapreplace(free, free[0] + late + num_bytes(one, costs))
    return round(max(free) * programs / ideal, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers,
                        default=[8, 16, 32, 48, 64, 96, 128, 256, 512, 1024])  # fmt: skip
    parser.add_argument("--splits", type=numbers, default=[1, 2, 3],
                        help="for each program, beside those that the backend chooses")  # fmt: skip
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--programs", type=int, default=2, help="of a multiprocessor at once")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=96)
    parser.add_argument("--sigmas", type=floats, default=[0.5, 1.0],
                        help="spreads of the heads' shares; 0.5: real heads")  # fmt: skip
    parser.add_argument("--latency", type=int, default=224,
                        help="keys that a program could read while a split begins")  # fmt: skip
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--itemsize", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "balance.json")
    args = parser.parse_args()
    programs = args.programs * args.multiprocessors
    costs, rows = Costs.of(args.group, args.head_size, args.itemsize), []
    keys_only = Costs(costs.token, 0)
    for sigma, requests in product(args.sigmas, args.batches):
        found = lengths(requests, sigma, args)
        ideal = sum(found) * costs.token
        for each in ("chosen", *args.splits):
            target = splits_to_fill(len(found), programs) if each == "chosen" else programs * each
            sequences = cut(found, target)
            in_order = [split for mine in sequences for split in mine]
            order = queue(sequences)
            ours = taken(order, programs, costs)
            row = {
                "sigma": sigma,
                "requests": requests,
                "splits per program": each,
                "target": target,
                "splits": len(in_order),
                "round robin": balance(dealt(in_order, programs, keys_only), ideal),
                "queue in order": balance(taken(in_order, programs, keys_only), ideal),
                "queue, longest first": balance(taken(order, programs, keys_only), ideal),
                "the same with partial sums": balance(ours, ideal),
                "time with latency": slowdown(
                    order, programs, costs, ideal, args.latency * costs.token
                ),
                "least over most bytes of a multiprocessor, by tenths": by_tenths(
                    ours, args.multiprocessors
                ),
            }
            rows.append(row)
            print(*row.values(), sep="\t")
    settings = {key: str(value) for key, value in vars(args).items()}
    content = {"settings": settings, "rows": rows, "provenance": provenance()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
