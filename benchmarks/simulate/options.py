"""The command line of the simulator."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulate.card import CARDS
from benchmarks.simulate.load import Conversations, Lengths, Load, Trace
from benchmarks.simulate.model import MODELS
from benchmarks.simulate.server import Machine
from benchmarks.simulate.setting import STOCK, Setting

OUTPUT = Path(__file__).parents[1] / "results" / "simulate.json"


@dataclass(frozen=True)
class Options:
    """What to run."""

    machine: Machine
    load: Load | Conversations | Trace
    clients: int
    steps: int
    settings: tuple[Setting, ...]
    output: Path

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> "Options":
        """Read the command line.

        Raises:
            SystemExit: argparse has printed what is wrong.

        """
        parser = _parser()
        given = parser.parse_args(argv)
        if given.burst is not None and given.rate is None:
            parser.error("--burst needs the --rate of the quiet phases")
        machine = Machine(
            model=given.model,
            card=CARDS[given.card],
            max_model_len=given.max_model_len,
            ranks=given.tensor_parallel_size,
            block_size=given.block_size,
            max_num_seqs=given.max_num_seqs,
            max_batched=given.max_num_batched_tokens,
            asynchronous=given.asynchronous,
            caching=not given.no_prefix_caching,
            blocks=given.blocks,
            utilization=given.gpu_memory_utilization,
        )
        shared: dict[str, Any] = dict(aborts=given.aborts, requests=given.requests, seed=given.seed)
        load: Load | Conversations | Trace
        if (given.conversations is None) != (given.turns is None):
            parser.error("give --conversations and --turns together")
        if given.conversations is not None:
            if given.conversations < 1 or given.turns < 1:
                parser.error("--conversations and --turns: give numbers of at least 1")
            others = ("trace", "rate", "shared", "point", "requests")
            if wrong := [name for name in others if getattr(given, name)]:
                parser.error(f"--conversations are a closed loop without --{', --'.join(wrong)}")
            load = Conversations(
                given.prompt, given.output_len, given.conversations, given.turns, given.aborts,
                given.seed,
            )  # fmt: skip
        elif given.trace is not None:
            load = Trace(given.trace, given.speed, **shared)
        else:
            load = Load(
                given.prompt,
                given.output_len,
                given.shared,
                given.prefixes,
                given.rate,
                point=given.point,
                burst=given.burst,
                period=given.period,
                **shared,
            )
        clients = given.clients or 2 * given.max_num_seqs
        settings = tuple(given.setting or (Setting(STOCK), Setting.parse("ada-snapkv:1024")))
        return cls(machine, load, clients, given.steps, settings, given.output)

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        load = asdict(self.load)
        return {
            "machine": asdict(self.machine),
            "load": {key: str(value) if key == "path" else value for key, value in load.items()},
            "clients": self.clients,
            "steps": self.steps,
        }


def _read(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="vLLM's real schedulers, stock and with eviction, without a model.",
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)}, or a config.json")
    add("--max-model-len", type=int, help="longest sequence (default: the model's)")
    add("--card", default="h100", choices=CARDS)
    add("--tensor-parallel-size", type=int, default=1)
    add("--block-size", type=int, default=32)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--async", dest="asynchronous", action="store_true", help="vLLM's async scheduler")
    add("--no-prefix-caching", action="store_true")
    add("--blocks", type=int, help="size of the pool (default: what the card's memory holds)")
    add("--gpu-memory-utilization", type=float, default=0.9)
    lengths = _read(Lengths.parse)
    add("--prompt", type=lengths, default=Lengths(2000, 2000), help="tokens: 2000 or 1000-4000")
    add("--output-len", type=lengths, default=Lengths(500, 500), help="tokens: 500 or 100-900")
    add("--shared", type=int, default=0, help="tokens at the start of every prompt that are shared")
    add("--point", action="store_true", help="what is shared ends at each request's eviction point")
    add("--prefixes", type=int, default=1, help="kinds of shared beginnings")
    add(
        "--clients", type=int, help="closed loop: unfinished requests (default: twice max-num-seqs)"
    )
    add("--conversations", type=int, help="closed loop: conversations that grow, with --turns")
    add("--turns", type=int, help="turns of each; --prompt are the new tokens of a turn")
    add("--rate", type=float, help="Poisson: requests a second in place of the closed loop")
    add("--burst", type=float, help="Poisson: the rate in the second half of every period")
    add("--period", type=float, default=120.0, help="seconds, of a load with bursts")
    add("--trace", type=Path, help="recorded arrivals: a Mooncake trace (JSON lines)")
    add("--speed", type=float, default=1.0, help="replay the trace that much faster")
    add("--aborts", type=float, default=0.0, help="share of requests whose client goes away")
    add("--requests", type=int, help="requests in all (default: no end, or the whole trace)")
    add("--steps", type=int, default=2000, help="at most so many steps")
    add("--seed", type=int, default=0)
    add(
        "--setting",
        action="append",
        type=_read(Setting.parse),
        help="stock, or POLICY:BUDGET[,key=value...]; several times, side by side",
    )
    add("--output", type=Path, default=OUTPUT, help="the result file; table and plot beside it")
    return parser
