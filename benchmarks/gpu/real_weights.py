"""Greedy answers of a model with real weights on a GPU, against those of a CPU.

    python -m benchmarks.gpu.real_weights --model FOLDER --make reference.json     # on a CPU
    python -m benchmarks.gpu.real_weights --model FOLDER --reference reference.json --output FILE

Both serve the full cache, two budgets, and ``auto`` with the profile that ships. An answer is
compared up to the first token at which the CPU's two best tokens nearly tie, because rounding
decides there. Evictions also choose by rounded scores, so some later differences are no errors: the
rows say how many tokens agree, and how often an answer differs before a near tie.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import RESULTS
from benchmarks.gpu.part import Part, add_options
from benchmarks.server import Server

SETTINGS = {
    "profile": ["--kv-eviction", "auto", "--kv-eviction-budget", "25%"],
    "full": [],
    "25%": ["--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "25%",
            "--kv-eviction-profile", "none"],
    "12.5%": ["--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "12.5%",
              "--kv-eviction-profile", "none"],
}  # fmt: skip
"""Flags of each server; the shipped profile has networks. The first ones are the most important."""
PROMPTS = 24
NEW_TOKENS = 32
NEAR_TIE = 0.25
"""Difference of log-probabilities below which another device may choose the other token."""
READY_S = 300
START_S = 40
"""Estimated seconds until one server is ready."""
BESIDE_S = 10
"""Estimated seconds that each further server adds when several start at the same time."""
ASK_S = 6
"""Estimated seconds for the answers of one server."""
KV_BYTES = 2**30
"""Bytes of the KV cache of each server. Servers that start at the same time would disturb vLLM's
own measurement of free memory."""
EVICTIONS = "vllm_kvevict:evictions_total"
NAMES = "Ada Basel Cairo Delhi Essen Fargo Ghent Hanoi Izmir Kyoto Lagos Malmo Osaka Perth".split()
GOODS = "apples books clocks drums eggs flags globes hats jars kites lamps maps nails".split()

Answer = dict[str, Any]


def prompts() -> list[str]:
    """Long records, and a question about one of them."""
    found = []
    for number in range(PROMPTS):
        rand = random.Random(number)
        lines = [
            f"The store of {rand.choice(NAMES)} number {entry} has {rand.randint(10, 99)} "
            f"{rand.choice(GOODS)} and {rand.randint(10, 99)} {rand.choice(GOODS)}."
            for entry in range(rand.randint(40, 70))
        ]
        asked = rand.randrange(len(lines))
        place, _, _ = lines[asked].partition(" has ")
        found.append("\n".join(lines) + f"\n\nIn short: {place[0].lower()}{place[1:]} has")
    return found


def ask(server: Server) -> list[Answer]:
    """Tokens, and by how much each was likelier than the next one."""
    found = []
    for prompt in prompts():
        body = dict(
            model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=2,
            ignore_eos=True,
        )  # fmt: skip
        said = server.post("/v1/completions", body)["choices"][0]["logprobs"]
        margins = []
        for best in said["top_logprobs"]:
            first, second, *_ = sorted(best.values(), reverse=True)
            margins.append(round(first - second, 4))
        found.append({"tokens": said["tokens"], "margins": margins})
    return found


def command(flags: list[str], serve_args: str) -> list[str]:
    options = ["--max-model-len", "4096", "--block-size", "32", "--max-num-seqs", "8"]
    options += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    return [*options, *flags, *serve_args.split()]


def answered(server: Server, name: str) -> dict[str, Any]:
    """Answers under one setting, and what the server counted."""
    answers = ask(server)
    evictions = int(server.metric(EVICTIONS))
    if bool(evictions) != (name != "full"):
        raise RuntimeError(f"{name}: {evictions} evictions")
    return {
        "answers": answers,
        "evictions": evictions,
        "cuda_kernels": "KV eviction runs CUDA kernels for" in server.log.read_text(),
    }


@contextmanager
def starting(
    model: Path, names: Sequence[str], args: argparse.Namespace
) -> Iterator[list[Future[Server]]]:
    """Servers that start at the same time; one that fails says so as the result of its future."""
    share = f"--gpu-memory-utilization {0.9 / len(names):.2f}" if len(names) > 1 else ""
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        found = []
        for name in names:
            flags = command(SETTINGS[name], f"{share} {args.serve_args}")
            server = Server(model, flags, args.scratch / f"real-{name}.log", READY_S)
            found.append(pool.submit(stack.enter_context, server))
        yield found


def compared(mine: list[Answer], reference: list[Answer]) -> dict[str, Any]:
    """How far answers agree with the reference, up to the first near tie of each."""
    tokens = equal = whole = 0
    for own, other in zip(mine, reference, strict=True):
        sure = next(
            (i for i, margin in enumerate(other["margins"]) if margin < NEAR_TIE),
            len(other["margins"]),
        )
        pairs = zip(own["tokens"][:sure], other["tokens"][:sure], strict=True)
        agree = next((i for i, (a, b) in enumerate(pairs) if a != b), sure)
        tokens, equal, whole = tokens + sure, equal + agree, whole + (agree == sure)
    return {"answers": len(mine), "as the reference": whole, "tokens": tokens, "equal": equal}


def seconds(servers: int) -> float:
    """An estimate for servers that start at the same time."""
    return START_S + (servers - 1) * BESIDE_S + servers * ASK_S


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--make", type=Path, help="write the reference there")
    parser.add_argument("--reference", type=Path, help="answers of a CPU")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SETTINGS))
    parser.add_argument(
        "--together",
        type=int,
        default=len(SETTINGS),
        help="servers that start at the same time; with --make one after another",
    )
    parser.add_argument("--serve-args", default="", help="further arguments of vllm serve")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "kvevict-gpu",
                        help="for the servers' logs")  # fmt: skip
    add_options(parser, RESULTS / "real_weights.json")
    return parser


def main() -> None:
    args = parser().parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    if args.make:
        found = {}
        for name in args.only:
            with starting(args.model, [name], args) as (server,):
                found[name] = answered(server.result(), name)
        args.make.parent.mkdir(parents=True, exist_ok=True)
        args.make.write_text(json.dumps(found) + "\n")
        print(args.make)
        return
    if args.reference is None:
        sys.exit("give --make on a CPU, or --reference on a GPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    part = Part("real_weights", args, device, choice=("only",))
    reference = json.loads(args.reference.read_text())

    def run(server: Server, name: str) -> dict[str, Any]:
        mine = answered(server, name)
        return mine | compared(mine.pop("answers"), reference[name]["answers"])

    due = [key["setting"] for key in part.due(dict(setting=name) for name in args.only)]
    for first in range(0, len(due), args.together):
        names = due[first : first + args.together]
        if part.fits(seconds(len(names)), *(dict(setting=name) for name in names)):
            with starting(args.model, names, args) as servers:
                for name, server in zip(names, servers, strict=True):
                    part.attempt(
                        dict(setting=name),
                        lambda name=name, server=server: run(server.result(), name),
                    )
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
