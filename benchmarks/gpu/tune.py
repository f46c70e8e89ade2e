"""Times of our decode kernel by its parameters, on a GPU.

``python -m benchmarks.gpu.tune --help``. Each row is a shape and a choice of the parameters that
:mod:`vllm_kvevict.attention.scratch` and :mod:`vllm_kvevict.ops.triton.residency` fix. Steps,
caches and clocks are those of :mod:`benchmarks.gpu.attention`.
"""

import argparse
from itertools import product
from typing import Any

import torch

from benchmarks.gpu import heads
from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.clock import captured, copy_bandwidth, milliseconds, spread
from benchmarks.gpu.part import Key, Part, add_options
from vllm_kvevict.attention.scratch import Shape
from vllm_kvevict.ops.triton import decode
from vllm_kvevict.ops.triton.merge import Partials
from vllm_kvevict.ops.triton.slices import Slices

ROW_S = 0.5
"""Of a row, compiling included. On an H100, 120 rows of another grid took 0.3 s on average."""


def shapes(text: str) -> list[tuple[int, int]]:
    """``requests/budget``, comma-separated."""
    return [tuple(int(part) for part in item.split("/")) for item in text.split(",")]  # type: ignore[misc]


class Tuned:
    """A decode step with selectable kernel parameters."""

    def __init__(self, args: argparse.Namespace, requests: int, budget: int) -> None:
        self.args = args
        self.device = torch.device(args.device)
        shape = Shape(8, 4, 128, 16, requests, max(32768, 8 * budget))
        self.step = heads.Step(
            requests, budget, 96, shape, torch.bfloat16, self.device, sigma=args.sigma
        )
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.bandwidth = copy_bandwidth(self.device, 2**30)

    def time(self, choice: Key) -> dict[str, Any]:
        """Milliseconds of a layer, and the share of the bandwidth of a copy."""
        step, shape = self.step, self.step.shape
        programs = self.processors * choice["programs"]
        sequences = step.requests * shape.num_heads
        step.slices = Slices.room(step.layers, sequences, programs, self.device)
        step.triton.partials = Partials.room(programs, shape.group, shape.head_size, self.device)
        step.stages = choice["stages"]
        before = decode.TILE, heads.BEFORE_SEQUENCE
        decode.TILE, heads.BEFORE_SEQUENCE = choice["tile"], choice["before"]
        try:
            graph = captured(self.step.run_triton, self.device)
            times = milliseconds(graph, self.device, self.args.repeats)
        finally:
            decode.TILE, heads.BEFORE_SEQUENCE = before
        figures: dict[str, Any] = {"layer": spread(times, self.step.layers)}
        floor = self.step.num_bytes / self.bandwidth * 1000
        figures["share of copy bandwidth"] = floor / figures["layer"]["median_ms"]
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=shapes,
                        default=shapes("8/1024,16/1024,32/1024,48/1024,64/1024,256/1024,"
                                       "16/4096,64/4096"))  # fmt: skip
    parser.add_argument("--programs", type=numbers, default=[2], help="of a multiprocessor")
    parser.add_argument("--stages", type=numbers, default=[3, 5])
    parser.add_argument("--before", type=numbers, default=[0, 96, 192],
                        help="room before a sequence, in keys")  # fmt: skip
    parser.add_argument("--tile", type=numbers, default=[64])
    parser.add_argument("--sigma", type=float, default=0.5, help="0.5: heads of real models")
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--repeats", type=int, default=10)
    add_options(parser, RESULTS / "tune.json")
    args = parser.parse_args()
    part = Part("tune", args, torch.device(args.device))
    for requests, budget in args.shapes:
        tuned = Tuned(args, requests, budget)
        names = ("programs", "stages", "before", "tile")
        grid = product(*(getattr(args, name) for name in names))
        choices = [dict(zip(names, values, strict=True)) for values in grid]
        keys = [dict(requests=requests, budget=budget, **choice) for choice in choices]
        part.measure(keys, lambda key: ROW_S, tuned.time)
        best = sorted(
            (row for row in part.rows if row["requests"] == requests and row["budget"] == budget),
            key=lambda row: row.get("layer", {"median_ms": 9e9})["median_ms"],
        )
        for row in best[:3]:
            print(
                {name: row[name] for name in (*names, "share of copy bandwidth")}, requests, budget
            )
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
