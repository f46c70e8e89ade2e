"""Options of ``python -m benchmarks.alternatives``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.alternatives.ways import KEYS, KVPRESS
from benchmarks.decode_node import kv_bytes
from benchmarks.quality.kvpress_baseline import PYTHON
from benchmarks.quality.own_server import BLOCK_SIZE as BLOCK
from vllm_kvevict.serving.cpu_dtype import fast_dtype

RESULT = Path("benchmarks/results/alternatives.json")
TASKS = ("later", "s-niah")
QUICK = dict(
    samples=2, length=400, prompt=512, output_tokens=16, requests=4,
    output=Path(".cache/alternatives/quick.json"), work=Path(".cache/alternatives/quick"),
)  # fmt: skip
CITE, RUN, NONE = "cite", "run", "none"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with a message that names a wrong flag."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alternatives",
        description="Alternatives to eviction at equal KV-cache memory: answers and load.",
    )
    parser.add_argument("--model", type=Path, help="folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--layers", metavar="PROFILE", help="--kv-eviction-profile of auto")
    parser.add_argument(
        "--samples",
        type=int,
        default=100,
        help="questions of each task, 0 for none (100)",
    )
    parser.add_argument("--length", type=int, default=1250, help="tokens of a question (1250)")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a load's prompt (1500)")
    parser.add_argument("--output-tokens", type=int, default=128, help="of the load (128)")
    parser.add_argument("--requests", type=int, default=24, help="of the load, all at once (24)")
    parser.add_argument(
        "--memory", default="2", help="whole requests that the KV cache holds, or 84M for bytes (2)"
    )
    parser.add_argument("--clients", type=int, default=2, help="questions asked at once (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (0)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default=fast_dtype(),
        help="of the models (the faster one on this CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="compile the models, which takes a minute per row"
    )
    parser.add_argument(
        "--rows", default=",".join(KEYS), help="stock and auto are always measured (all)"
    )
    parser.add_argument(
        "--kvpress", choices=(CITE, RUN, NONE), default=CITE,
        help="cite its published answers, run it (needs `make setup-kvpress`; slow), or leave it "
        "out (cite)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULT, help=f"({RESULT})")
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/alternatives"), help="logs and journals"
    )
    parser.add_argument("--resume", action="store_true", help="keep what --work holds of this run")
    parser.add_argument("--quick", action="store_true", help="the least of everything, to try it")
    first, _ = parser.parse_known_args(argv)
    if first.quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    args.rows = [part.strip() for part in args.rows.split(",") if part.strip()]
    if unknown := [row for row in args.rows if row not in KEYS]:
        parser.error(f"--rows: {', '.join(unknown)}; choose from {', '.join(KEYS)}")
    least = dict(samples=0, length=1, prompt=1, output_tokens=1, requests=1, clients=1)
    for name, bound in least.items():
        if getattr(args, name) < bound:
            parser.error(f"--{name.replace('_', '-')}: give a number of at least {bound}")
    # A server admits no longer prompt than the load's, so a longer question would be refused.
    if args.length + 64 > args.prompt + args.output_tokens:
        parser.error("--length: at most --prompt plus --output-tokens minus 64 tokens")
    if args.kvpress == RUN and KVPRESS in args.rows and not PYTHON.exists():
        parser.error(f"--kvpress run: {PYTHON} is missing; run `make setup-kvpress`")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model: no folder {args.model}")
    try:
        kv_bytes(sizes(args), Path(), args.memory)
    except FileNotFoundError:
        pass  # A number of requests, which depends on the model.
    except ValueError as error:
        parser.error(str(error))
    return args


def sizes(args: argparse.Namespace) -> argparse.Namespace:
    """Return the sizes of the servers as :mod:`benchmarks.decode_node` reads them."""
    return argparse.Namespace(
        prompt=args.prompt, output=args.output_tokens, requests=args.requests,
        eager=not args.compile, dtype=args.dtype, block_size=BLOCK,
    )  # fmt: skip
