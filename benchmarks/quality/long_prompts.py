"""Prompts longer than the KV cache, evicted as they stream in: what their continuation loses.

    python -m benchmarks.quality.long_prompts [--texts 4] [--context 8000] [--blocks 63]

A server whose pool holds a quarter of the prompt reads it with evictions every K tokens and is made
to say the true continuation (`forced.py`); so is one whose pool holds it all, with the full cache
and with one eviction at the prompt's end (K of 0). Reported are the negative log-likelihood of the
continuation and the share of its tokens at which the first choice is the full cache's.

`--kind facts` spreads facts of the task `unseen` over each text, asks for each in a prompt of its
own, and makes the server say the true answer: what it loses of a fact that it read far back. The
full cache alone is its comparison: a short answer ends before an eviction at the prompt's end.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.provenance import provenance
from benchmarks.quality.endpoint import Endpoint, Followed
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.long_report import joined, markdown, plot, summarize
from benchmarks.quality.prompt import make_prompt
from benchmarks.quality.ruler.prose import passage
from benchmarks.quality.ruler.scattered import scattered
from benchmarks.server import Server
from benchmarks.smollm2 import real_model
from vllm_kvevict.config.names import AUTO
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.serving.profile import SHIPPED, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROSE, FACTS = "prose", "facts"
BLOCK = 32

EVICTIONS = "vllm_kvevict:evictions_total"

Ids = tuple[int, ...]
Part = tuple[Ids, Ids]
"""What the server reads, and what it is made to say."""


class Chat(Protocol):
    """What makes prompts of texts: an :class:`Endpoint`, say."""

    def encode(self, text: str) -> list[int]: ...
    def tokenize(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class Setting:
    """What a request asks for; no policy for the full cache, an interval of 0 for its end only."""

    policy: str | None = None
    budget: int | None = None
    interval: int | None = None

    @property
    def xargs(self) -> dict[str, Any]:
        if self.policy is None:
            return {"kv_eviction": "none"}
        return {
            "kv_eviction": self.policy,
            "kv_eviction_budget": self.budget,
            "kv_eviction_prefill_interval": self.interval,
        }


def server(blocks: int, options: argparse.Namespace, interval: int) -> Server:
    """A server with memory for so many blocks of all layers, vLLM's own null block included."""
    if options.profile:
        # A block of a group of layers is as many times smaller.
        blocks = (blocks - 1) * groups(options.profile) + 1
    args = [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK), "--seed", "0",
        "--num-gpu-blocks-override", str(blocks), "--kv-cache-memory-bytes", "256M",
        "--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--max-num-seqs", "4",
        "--enable-prefix-caching", "--disable-uvicorn-access-log", "--no-enable-log-requests",
        "--logits-processors", "benchmarks.quality.forced:ForcedTokens",
        "--kv-eviction", options.policies[0],
        "--kv-eviction-allow", ",".join(["none", *options.policies]),
        "--kv-eviction-budget", str(max(options.budgets)),
        "--kv-eviction-prefill-interval", str(interval),
    ]  # fmt: skip
    if options.profile:
        args += ["--kv-eviction-profile", options.profile]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)}
    return Server(options.model or real_model(), args, options.work / f"long-{blocks}.log", env=env)


def groups(profile: str) -> int:
    """Groups of layers that a server makes of a profile."""
    path = next(SHIPPED.glob("*.json")) if profile == AUTO else Path(profile)
    return len(by_layer(read(path).layers, None)[0].sizes)


def parts(chat: Chat, options: argparse.Namespace, seed: int) -> list[Part]:
    """A text and its continuation; or each question about a text, and its answer."""
    rng = random.Random(f"long/{seed}")
    if options.kind == FACTS:
        samples = scattered(rng, options.context, options.facts, chat.encode)
        prompts = [make_prompt(sample, chat.tokenize, chat.encode) for sample in samples]
        return [(one.ids, tuple(chat.encode(f" {one.sample.answers[0]}"))) for one in prompts]
    wanted = options.context + options.continuation
    ids = tuple(chat.encode(" ".join(passage(rng, 6 * wanted)))[:wanted])
    return [(ids[: options.context], ids[options.context :])]


def write(options: argparse.Namespace, rows: Sequence[Any], evictions: dict[str, int]) -> None:
    settings = {k: str(v) for k, v in vars(options).items()}
    result = {
        **provenance(),
        "options": settings,
        "texts": len(rows),
        "pool_tokens": (options.blocks - 1) * BLOCK,
        "evictions": evictions,
        "settings": summarize(rows, Setting()),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(result))
    plot(result, options.output.with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=(PROSE, FACTS), default=PROSE)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--facts", type=int, default=4, help="in each text, with --kind facts")
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--policies", default="ada-defensive,streaming-llm")
    parser.add_argument("--budgets", default="512,1024")
    parser.add_argument("--intervals", default="128,512")
    parser.add_argument("--blocks", type=int, default=63, help="of the pool, vLLM's own included")
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--profile", help="of the model: a file, or auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(".cache/quality"))
    parser.add_argument("--output", type=Path, help="JSON; Markdown and PNG beside it")
    options = parser.parse_args()
    name = "long_facts.json" if options.kind == FACTS else "long_prompts.json"
    options.output = options.output or RESULTS / name
    options.policies = options.policies.split(",")
    options.budgets = [int(budget) for budget in options.budgets.split(",")]
    options.intervals = [int(interval) for interval in options.intervals.split(",")]
    return options


def follow(
    running: Server, options: argparse.Namespace, asked: list[Part], intervals: list[int]
) -> dict[Setting, Followed]:
    """What a server thinks of all parts of a text under every policy, budget and interval."""
    endpoint = Endpoint(running.url, timeout_s=1800)
    # An answer of one token ends before an eviction at the prompt's end.
    evicting = [] if options.kind == FACTS and intervals == [0] else options.policies
    wanted = [
        Setting(policy, budget, interval)
        for policy in evicting
        for budget in options.budgets
        for interval in intervals
    ]
    if 0 in intervals:
        wanted.insert(0, Setting())
    before, found = running.metric(EVICTIONS), {}
    for setting in wanted:
        found[setting] = joined(endpoint.follow(ids, rest, setting.xargs) for ids, rest in asked)
        print(setting, flush=True)
    least = sum(2 if one.interval else 1 for one in wanted if one.policy)
    if (count := running.metric(EVICTIONS) - before) < least:
        raise SystemExit(f"{count} evictions, {least} or more were asked for")
    return found


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    texts = [
        parts(LocalChat(options.model or real_model()), options, seed)
        for seed in range(options.texts)
    ]
    rows: list[dict[Setting, Followed]] = []
    with (
        server(-(-8192 // BLOCK) + 2, options, 0) as whole,
        server(options.blocks, options, max(options.intervals)) as short,
    ):
        for asked in texts:
            found = follow(whole, options, asked, [0])
            rows.append(found | follow(short, options, asked, options.intervals))
            write(options, rows, {"evictions": int(short.metric(EVICTIONS))})
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
