"""How evenly schedules of decode attention load a GPU, simulated: no kernel runs.

``python -m benchmarks.gpu.balance``. A layer's keys are cut into slices as ``ops/triton/slices.py``
does it, or into equal splits that programs take from a queue, the longest first. Each program reads
its pieces one after another, all at one speed. Balance is the time of a perfect schedule over that
of the program that ends last: the share of the bandwidth that is used. Partial sums, which pieces
of one sequence write and the last of them reads, count as bytes that a perfect schedule lacks.
``--latencies`` are keys that a program could read while a piece begins; times with them are those
of a perfect schedule without any, times a factor.
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
from vllm_kvevict.attention.scratch import BEFORE_SEQUENCE, MIN_SLICE
from vllm_kvevict.ops.triton.slices import STEP

TENTHS = 10
CLASSES = 64
"""Length classes by which the queue is ordered."""


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
    size = max(MIN_SLICE, -(-size // STEP) * STEP)
    found = []
    for length in lengths:
        count = max(1, -(-length // size))
        found.append([(size, count)] * (count - 1) + [(length - (count - 1) * size, count)])
    return found


def slices(
    lengths: Sequence[int], programs: int, before: int = BEFORE_SEQUENCE
) -> list[list[Split]]:
    """The pieces of every program: its keys of each sequence, and the pieces of that sequence."""
    occupied = [before + max(STEP, -(-length // STEP) * STEP) for length in lengths]
    size = max(MIN_SLICE, before + STEP, -(-sum(occupied) // (STEP * programs)) * STEP)
    mine: list[list[Split]] = [[] for _ in range(programs)]
    start = 0
    for length, space in zip(lengths, occupied, strict=True):
        key = start + before
        first, last = key // size, (start + space - 1) // size
        for program in range(first, last + 1):
            begin, end = max(key, program * size), min(key + length, (program + 1) * size)
            mine[program].append((end - begin, last - first + 1))
        start += space
    return mine


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


def time(mine: Sequence[Sequence[int]], ideal: float, late: int) -> float:
    """Time over that of a perfect schedule, if each piece costs ``late`` bytes more."""
    longest = max(sum(splits) + late * len(splits) for splits in mine)
    return round(longest * len(mine) / ideal, 3)


def queue_time(
    splits: Sequence[Split], programs: int, costs: Costs, ideal: float, late: int
) -> float:
    """The same of a queue, where a program that is done takes the next split."""
    free = [0] * programs
    for one in splits:
        heapq.heapreplace(free, free[0] + late + num_bytes(one, costs))
    return round(max(free) * programs / ideal, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers,
                        default=[8, 16, 32, 48, 64, 96, 128, 256, 512, 1024])  # fmt: skip
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--programs", type=int, default=2, help="of a multiprocessor at once")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=96)
    parser.add_argument("--sigmas", type=floats, default=[0.5, 1.0],
                        help="spreads of the heads' shares; 0.5: real heads")  # fmt: skip
    parser.add_argument("--latencies", type=numbers, default=[50, 100, 224],
                        help="keys that a program could read while a piece begins")  # fmt: skip
    parser.add_argument("--before", type=int, default=BEFORE_SEQUENCE,
                        help="room of slices for them, in keys")  # fmt: skip
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
        pieces = slices(found, programs, args.before)
        ours = [[num_bytes(one, costs) for one in mine] for mine in pieces]
        # A little longer than a program's part, or some take a short split as well.
        target = programs * 17 // 18 if len(found) <= programs else programs
        sequences = cut(found, target)
        in_order = [split for mine in sequences for split in mine]
        order = queue(sequences)
        row = {
            "sigma": sigma,
            "requests": requests,
            "pieces": sum(map(len, pieces)),
            "slices": balance(ours, ideal),
            "splits": len(order),
            "round robin": balance(dealt(in_order, programs, keys_only), ideal),
            "queue": balance(taken(order, programs, costs), ideal),
        }
        for late in args.latencies:
            more = late * costs.token
            row[f"slices, time at {late}"] = time(ours, ideal, more)
            row[f"queue, time at {late}"] = queue_time(order, programs, costs, ideal, more)
        tenths = by_tenths(ours, args.multiprocessors)
        row["least over most bytes of a multiprocessor, by tenths"] = tenths
        rows.append(row)
        print(*row.values(), sep="\t")
    settings = {key: str(value) for key, value in vars(args).items()}
    content = {"settings": settings, "rows": rows, "provenance": provenance()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
