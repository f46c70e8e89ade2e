"""Part 3: serving Llama-3.1-8B's shapes with dummy weights, stock against eviction.

``python -m benchmarks.gpu.serving --help``. A server is asked everything that needs its memory and
its flags; stock and evicting servers get the same memory, prefix caching, async scheduling and
graphs. ``--tiny`` replaces the model by a small one, to try the script on a CPU.
"""

import argparse
import contextlib
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.client import measure
from benchmarks.gpu.clock import spread
from benchmarks.gpu.dummy_profile import write as write_profile
from benchmarks.gpu.jobs import START_S, Job, Service, Shape, profile_path, services
from benchmarks.gpu.model import LLAMA_8B, TINY, make_model
from benchmarks.gpu.part import Part, add_options
from benchmarks.gpu.prefill import ask, prefill_ms
from benchmarks.server import Server

CHOICE = ("loads", "shares", "prefills", "policies", "steps", "only")
"""Options that only choose among rows."""
PREFILLS = 5
READY_S = 400
EVICTIONS = "vllm_kvevict:evictions_total"
KERNELS = "KV eviction runs CUDA kernels for"
ATTENTION = re.compile(r"KV eviction attention on this rank: (\S+) kernel")


def loads(text: str) -> list[Shape]:
    """``input/output/prompts that stock's memory holds/prompts in all``, comma-separated."""
    return [tuple(int(part) for part in item.split("/")) for item in text.split(",")]  # type: ignore[misc]


def figures(server: Server, job: Job, vocab: int) -> dict[str, Any]:
    """What a job measures."""
    if job.load is None:
        return {"prefill": spread(prefill_ms(server, job.key["input"], vocab, PREFILLS))}
    before = server.metric(EVICTIONS)
    found = measure(server, job.load, vocab)
    found["evictions"] = int(server.metric(EVICTIONS) - before)
    return found


def logged(log: str) -> dict[str, Any]:
    """What a server's log says of eviction; nothing in a stock server's."""
    kernel = ATTENTION.search(log)
    return {"cuda_kernels": KERNELS in log} | ({"attention": kernel[1]} if kernel else {})


def command(service: Service, args: argparse.Namespace) -> list[str]:
    """Arguments of ``vllm serve`` after the model."""
    blocks = -(-service.longest // args.block_size)
    options = [
        "--load-format", "dummy", "--max-model-len", str(blocks * args.block_size),
        "--block-size", str(args.block_size), "--max-num-seqs", str(args.max_num_seqs),
        "--kv-cache-memory-bytes", str(service.kv_bytes),
    ]  # fmt: skip
    if args.together > 1:
        # vLLM checks this share at start-up, also where the bytes of the KV cache are given.
        options += ["--gpu-memory-utilization", f"{0.9 / args.together:.2f}"]
    return [*options, *service.eviction, *args.serve_args.split()]


def missing(service: Service, part: Part) -> list[Job]:
    return [job for job in service.jobs if not part.has(job.key)]


def ask_all(service: Service, server: Server, args: argparse.Namespace, part: Part) -> None:
    """Measure the missing rows of a server that is ready, as far as the time allows."""
    jobs, vocab = missing(service, part), args.vocab
    # What only a whole request makes vLLM compile.
    longest = max(job.key["input"] for job in jobs)
    ask(server, longest, min(40, service.longest - longest), vocab, seed=-1)

    def asked(job: Job) -> dict[str, Any]:
        try:
            found = figures(server, job, vocab)
        except Exception as error:
            raise RuntimeError(f"{error}\n{server.log.read_text()[-2000:]}") from error
        return found | logged(server.log.read_text()) | {"kv_bytes": service.kv_bytes}

    for job in jobs:
        if part.fits(job.seconds, job.key):
            part.attempt(job.key, lambda job=job: asked(job))


def run(services: list[Service], args: argparse.Namespace, part: Part, model: Path) -> None:
    """Start servers at the same time, ask one after another; or none, if time is short."""
    services = [one for one in services if missing(one, part)]
    jobs = [job for one in services for job in missing(one, part)]
    # A start is dear, so a server is asked everything or, in this call, nothing.
    if not jobs or not part.fits(
        args.start + sum(job.seconds for job in jobs), *(j.key for j in jobs)
    ):
        return
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(services)) as pool:
        starting = []
        for one in services:
            log = args.scratch / f"{one.name}.log"
            server = Server(model, command(one, args), log, READY_S)
            starting.append(pool.submit(stack.enter_context, server))
        for one, future in zip(services, starting, strict=True):
            try:
                ask_all(one, future.result(), args, part)
            except Exception as error:
                for job in missing(one, part):
                    part.fail(job.key, error)


def batched(services: list[Service], size: int) -> Iterator[list[Service]]:
    """Successive lists of at most ``size`` services."""
    left = iter(services)
    while turn := list(islice(left, size)):
        yield turn


def sweep(args: argparse.Namespace) -> Part:
    """All servers, one after another; those whose rows failed before come last."""
    config = LLAMA_8B | (TINY if args.tiny else {})
    model = make_model(args.scratch / "model", config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    part = Part("serving", args, device, choice=CHOICE)
    planned = [one for one in services(args, config) if one.name in (args.only or [one.name])]
    args.vocab = config["vocab_size"]
    if any(str(profile_path(args)) in one.eviction and missing(one, part) for one in planned):
        write_profile(model, profile_path(args), config["head_dim"])
    planned.sort(key=lambda one: part.failed(job.key for job in one.jobs))
    for services_of_a_turn in batched(planned, args.together):
        run(services_of_a_turn, args, part, model)
    return part


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--loads", type=loads, default=loads("6000/500/4/96,32000/4000/4/16"))
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",")],
                        default=[12.5], help="budgets in % of the prompt")  # fmt: skip
    parser.add_argument("--prefills", type=numbers, default=[32768])
    parser.add_argument("--few", type=int, default=16, help="requests where memory is no limit")
    parser.add_argument("--repeats", type=int, default=3, help="loads where memory is no limit")
    parser.add_argument("--only", type=lambda text: text.split(","), help="servers, by name")
    parser.add_argument("--policies", type=lambda text: text.split(","),
                        default=["auto", "ada-snapkv"],
                        help="the first decides the verdicts; auto has a profile")  # fmt: skip
    parser.add_argument("--steps", type=numbers, default=[2048],
                        help="tokens of a step, for another row of the first policy")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="servers that start at the same time; each is measured alone",
    )
    parser.add_argument("--start", type=float, default=START_S,
                        help="seconds that the start of a server takes, an estimate")  # fmt: skip
    parser.add_argument("--serve-args", default="", help="further arguments of vllm serve")
    parser.add_argument("--scratch", type=Path, help="for the model and the servers' logs",
                        default=Path(tempfile.gettempdir()) / "kvevict-gpu")  # fmt: skip
    add_options(parser, RESULTS / "serving.json")
    return parser


def main() -> None:
    args = parser().parse_args()
    part = sweep(args)
    print(args.output)
    raise SystemExit(part.outcome())


if __name__ == "__main__":
    main()
