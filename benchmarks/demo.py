"""`make demo`: a real model answers the same questions and load, without and with eviction.

Starts `vllm serve` three times: stock and with `--kv-eviction auto` on KV memory for two full
prompts, and stock with as much as all requests want, which is the limit. Asks the first two about
long English texts through the OpenAI client, where the question is known when the text is evicted
and where it is not, drives each with `vllm bench serve`, and prints and draws one comparison.
"""

import argparse
import json
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import matplotlib.pyplot as plt
from openai import OpenAI
from tqdm import tqdm

from benchmarks.facts import Question, questions
from benchmarks.load import Load, measure
from benchmarks.provenance import provenance, sentence
from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model

PROMPT, OUTPUT, BLOCK = 2048, 128, 32
FOLDER = Path(".cache") / "demo"
POLICY, BUDGET = "auto", "25%"
"""As in the first command of README, and as ``auto`` without a budget."""
CHARACTERS = 8000
"""Of a text: about 1,800 tokens."""


def block_bytes(model: Path) -> int:
    """Bytes of one block of the KV cache in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * BLOCK * 2 * config["head_dim"] * 2


NAMES = {"stock": "stock vLLM", "eviction": "--kv-eviction auto", "limit": "stock, all memory"}
"""The servers; the last has memory for every request of the load at once."""


RATIO = "auto / stock"
"""Title of the last column: the second column divided by the first."""


def blocks(requests: int) -> int:
    """Blocks of so many full prompts with their answers, and the null block."""
    return requests * -(-(PROMPT + OUTPUT) // BLOCK) + 1


def server_args(model: Path, requests: int = 2) -> list[str]:
    """A server's arguments, with KV memory for so many full prompts with their answers."""
    return [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(blocks(requests) * block_bytes(model)), "--seed", "0",
    ]  # fmt: skip


AT_FIRST_MESSAGE = {"vllm_xargs": {"kv_eviction_at": {"message": 0}}}
"""Evicts at the end of a chat's first message."""


def ask(server: Server, model: Path, asked: list[Question], known: bool, evicts: bool) -> list[str]:
    """Chat answers through the OpenAI client, four questions at once.

    ``known`` says whether the question is in the prompt that is evicted; else it comes after the
    text was evicted, in a message of its own. Stock vLLM refuses mappings in ``vllm_xargs``.
    """
    client = OpenAI(base_url=server.url + "/v1", api_key="none")

    def answer(question: Question) -> str:
        texts = [question.message()] if known else question.messages()
        completion = client.chat.completions.create(
            model=str(model),
            messages=[{"role": "user", "content": text} for text in texts],
            max_tokens=48,
            temperature=0,
            extra_body={} if known or not evicts else AT_FIRST_MESSAGE,
        )
        return (completion.choices[0].message.content or "").strip()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(answer, asked))


def start(arguments: dict[str, list[str]], model: Path, stack: ExitStack) -> dict[str, Server]:
    """Start servers by label, all at once: a start is one process's work, mostly imports."""
    servers = {
        label: Server(model, args, FOLDER / f"{label}.log") for label, args in arguments.items()
    }
    with ThreadPoolExecutor(len(servers)) as threads:
        started = [threads.submit(stack.enter_context, server) for server in servers.values()]
    for future in started:
        future.result()
    return servers


def told(server: Server, model: Path, asked: list[Question], evicts: bool) -> dict:
    """What a server answers, and how much of it is right."""
    answers = {known: ask(server, model, asked, known, evicts) for known in (True, False)}
    right = {
        known: sum(one.right(text) for one, text in zip(asked, texts, strict=True))
        for known, texts in answers.items()
    }
    return {
        "right": right[True],
        "right_unknown": right[False],
        "answers": answers[True],
        "later": answers[False],
    }


def run(model: Path, load: Load, asked: list[Question], eviction: list[str]) -> dict[str, dict]:
    """A row for each of :data:`NAMES`; the last is not asked, as it answers like the first."""
    few = server_args(model)
    arguments = {
        "stock": few,
        "eviction": few + eviction,
        "limit": server_args(model, load.concurrency),
    }
    with (
        tqdm(total=6, bar_format="{desc} [{n_fmt}/{total_fmt}, {elapsed}]") as bar,
        ExitStack() as stack,
    ):
        bar.set_description(f"starting three vllm serve (logs: {FOLDER}/*.log)")
        servers = start(arguments, model, stack)
        bar.update()
        rows: dict[str, dict] = {}
        for label in ("stock", "eviction"):
            bar.set_description(f"{NAMES[label]}: asking over HTTP")
            rows[label] = told(servers[label], model, asked, evicts=label == "eviction")
            bar.update()
        # One at a time: they share the machine.
        for label, server in servers.items():
            bar.set_description(f"{NAMES[label]}: vllm bench serve, {load.num_prompts} requests")
            rows[label] = rows.get(label, {}) | measure(server, model, load) | server.evictions()
            bar.update()
    return rows


FIRST = (
    ("sequences at once", "peak_running", "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
)
"""Lines that are printed before everything else."""

LINES = (
    *FIRST,
    ("right, question known", "right", "{:.0f}"),
    ("right, not known", "right_unknown", "{:.0f}"),
    ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
    ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("evictions", "evictions", "{:.0f}"),
    ("blocks freed", "blocks_freed", "{:.0f}"),
)
"""Title, key of a row, and how it is written."""


def table(rows: dict[str, dict], lines: tuple[tuple[str, str, str], ...] = LINES) -> str:
    """The comparison as text, with the ratio of eviction to stock on the same memory."""
    out = [f"{'':<24}" + "".join(f"{name:>20}" for name in NAMES.values()) + f"{RATIO:>14}"]
    for title, key, form in lines:
        values = [rows[label].get(key) for label in NAMES]
        ratio = f"{values[1] / values[0]:.2f}x" if values[0] and values[1] is not None else "-"
        texts = ["-" if value is None else form.format(value) for value in values]
        cells = "".join(f"{text:>20}" for text in texts)
        out.append(f"{title:<24}{cells}{ratio:>14}")
    return "\n".join(out)


def draw(rows: dict[str, dict], path: Path) -> None:
    """Bars of what the table compares first."""
    figure, axes = plt.subplots(1, 5, figsize=(13, 3.2), layout="constrained")
    for place, (title, key, form) in zip(axes, LINES, strict=False):
        values = [rows[label].get(key) for label in NAMES]
        heights = [value or 0 for value in values]
        bars = place.bar(range(len(NAMES)), heights, color=["#9e9e9e", "#3182bd", "#d9d9d9"])
        texts = ["not asked" if value is None else form.format(value) for value in values]
        place.bar_label(bars, texts, fontsize=8)
        place.set_title(title, fontsize=9)
        place.set_xticks(range(len(NAMES)), NAMES.values(), fontsize=7, rotation=20)
        for side in ("top", "right"):
            place.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def side_by_side(asked: list[Question], rows: dict[str, dict]) -> str:
    """Every question with the answers of both servers on the same memory."""
    lines = []
    for index, question in enumerate(asked):
        lines.append(f"\n{question.question}")
        for label, key, name in (
            ("stock", "answers", "stock vLLM"),
            ("eviction", "answers", "evicted"),
            ("eviction", "later", "asked later"),
        ):
            text = " ".join(rows[label][key][index].split())
            lines.append(textwrap.fill(text, 96, initial_indent=f"  {name:<13}",
                                       subsequent_indent=" " * 15))  # fmt: skip
    return "\n".join(lines)


def markdown(shown: str, seconds: float, origin: dict) -> str:
    """The result file: where it comes from, and what was printed."""
    about = f"what `make demo` runs when it is set up: {seconds:.0f} s"
    return f"# `make demo`\n\n{sentence(origin, about)}\n\n```\n{shown}\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--budget", default=BUDGET)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output", type=Path, help="JSON file, and a Markdown file")
    options = parser.parse_args()

    try:
        model = real_model()
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    asked = questions(options.questions, CHARACTERS)
    load = Load(PROMPT, OUTPUT, options.requests, options.concurrency)
    eviction = ["--kv-eviction", options.policy, "--kv-eviction-budget", options.budget]
    began = time.monotonic()
    rows = run(model, load, asked, eviction)
    memory = f"{blocks(2) * block_bytes(model) / 2**20:.0f} MiB"
    shown = "\n".join(
        [
            f"On KV memory for two full prompts ({memory}):\n",
            table(rows, FIRST),
            f"\nSmolLM2-135M-Instruct about texts of {CHARACTERS:,} characters, "
            f"--kv-eviction {options.policy} --kv-eviction-budget {options.budget}:",
            side_by_side(asked, rows),
            f"\nLoad: {PROMPT}-token prompts, {OUTPUT} new tokens, {options.requests} requests, "
            f"{options.concurrency} at once;\nKV memory for two full prompts ({memory})\n",
            table(rows),
        ]
    )
    print("", shown, sep="\n")
    draw(rows, FOLDER / "demo.png")
    seconds = time.monotonic() - began
    print(f"\n{seconds:.0f} s in all; as a picture: {FOLDER / 'demo.png'}")
    if options.output:
        origin = provenance()
        options.output.write_text(json.dumps({"rows": rows, **origin}, indent=2) + "\n")
        options.output.with_suffix(".md").write_text(markdown(shown, seconds, origin))
    if rows["eviction"]["evictions"] < 2 * len(asked) + options.requests:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
