"""`make demo`: a real model answers the same questions and load, without and with eviction.

Starts `vllm serve` three times: stock and with `--kv-eviction auto` on KV memory for two full
prompts, and stock with as much as all requests want, which is the limit. Asks each about long
English texts through the OpenAI client, where the question is known when the text is evicted and
where it is not, drives each with `vllm bench serve`, and prints and draws one comparison.
"""

import argparse
import json
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
from openai import OpenAI
from tqdm import tqdm

from benchmarks.facts import FACTS, Question, questions
from benchmarks.load import Load, measure
from benchmarks.provenance import provenance
from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model

PROMPT, OUTPUT, BLOCK = 2048, 192, 32
FOLDER = Path(".cache") / "demo"
CHARACTERS = 8000
"""Of a text: about 1,800 tokens."""


def block_bytes(model: Path) -> int:
    """Bytes of one block of the KV cache in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * BLOCK * 2 * config["head_dim"] * 2


NAMES = {"stock": "stock vLLM", "eviction": "--kv-eviction auto", "limit": "stock, all memory"}
"""The servers; the last has memory for every request of the load at once."""


def server_args(model: Path, requests: int = 2) -> list[str]:
    """A server's arguments, with KV memory for so many full prompts with their answers."""
    blocks = requests * -(-(PROMPT + OUTPUT) // BLOCK) + 1
    return [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(blocks * block_bytes(model)), "--seed", "0",
    ]  # fmt: skip


def ask(server: Server, model: Path, asked: list[Question], known: bool) -> list[str]:
    """Chat answers through the OpenAI client, four questions at once.

    ``known`` says whether the question is in the prompt that is evicted; else it comes after the
    text was evicted, in a message of its own.
    """
    client = OpenAI(base_url=server.url + "/v1", api_key="none")

    def answer(question: Question) -> str:
        texts = [question.message()] if known else question.messages()
        completion = client.chat.completions.create(
            model=str(model),
            messages=[{"role": "user", "content": text} for text in texts],
            max_tokens=48,
            temperature=0,
            extra_body={} if known else {"vllm_xargs": {"kv_eviction_at_message": 0}},
        )
        return (completion.choices[0].message.content or "").strip()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(answer, asked))


def run(
    label: str, args: list[str], model: Path, load: Load, asked: list[Question], bar: tqdm
) -> dict:
    log = FOLDER / f"{label}.log"
    bar.set_description(f"{NAMES[label]}: starting vllm serve (log: {log})")
    with Server(model, args, log) as server:
        bar.update()
        bar.set_description(f"{NAMES[label]}: asking over HTTP")
        answers = {known: ask(server, model, asked, known) for known in (True, False)}
        bar.update()
        bar.set_description(f"{NAMES[label]}: vllm bench serve, {load.num_prompts} requests")
        row = measure(server, model, load)
        bar.update()
    right = {
        known: sum(one.right(text) for one, text in zip(asked, texts, strict=True))
        for known, texts in answers.items()
    }
    told = dict(right=right[True], right_unknown=right[False])
    return {**row, **server.evictions(), **told, "answers": answers[True], "later": answers[False]}


LINES = (
    ("right, question known", "right", "{:.0f}"),
    ("right, not known", "right_unknown", "{:.0f}"),
    ("peak running sequences", "peak_running", "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
    ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("evictions", "evictions", "{:.0f}"),
    ("blocks freed", "blocks_freed", "{:.0f}"),
)
"""Title, key of a row, and how it is written."""


def table(rows: dict[str, dict]) -> str:
    """The comparison as text, with the ratio eviction / stock on the same memory."""
    out = [f"{'':<24}" + "".join(f"{name:>20}" for name in NAMES.values()) + f"{'ratio':>8}"]
    for title, key, form in LINES:
        values = [rows[label].get(key, 0) for label in NAMES]
        ratio = f"{values[1] / values[0]:.2f}x" if values[0] else "-"
        cells = "".join(f"{form.format(value):>20}" for value in values)
        out.append(f"{title:<24}{cells}{ratio:>8}")
    return "\n".join(out)


def draw(rows: dict[str, dict], path: Path) -> None:
    """Bars of what the table compares first."""
    figure, axes = plt.subplots(1, 5, figsize=(13, 3.2), layout="constrained")
    for place, (title, key, form) in zip(axes, LINES, strict=False):
        values = [rows[label].get(key, 0) for label in NAMES]
        bars = place.bar(range(len(NAMES)), values, color=["#9e9e9e", "#3182bd", "#d9d9d9"])
        place.bar_label(bars, [form.format(value) for value in values], fontsize=8)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--budget", default="12.5%")
    parser.add_argument("--questions", type=int, default=len(FACTS))
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()

    try:
        model = real_model()
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    asked = questions(options.questions, CHARACTERS)
    load = Load(PROMPT, OUTPUT, options.requests, options.concurrency)
    args = server_args(model)
    eviction = ["--kv-eviction", options.policy, "--kv-eviction-budget", options.budget]
    began = time.monotonic()
    with tqdm(total=9, bar_format="{desc} [{n_fmt}/{total_fmt}, {elapsed}]") as bar:
        rows = {
            "stock": run("stock", args, model, load, asked, bar),
            "eviction": run("eviction", args + eviction, model, load, asked, bar),
            "limit": run("limit", server_args(model, options.concurrency), model, load, asked, bar),
        }
    print(f"\nSmolLM2-135M-Instruct about texts of {CHARACTERS:,} characters, "
          f"--kv-eviction {options.policy} --kv-eviction-budget {options.budget}:")  # fmt: skip
    print(side_by_side(asked, rows))
    print(
        f"\nLoad: {PROMPT}-token prompts, {OUTPUT} new tokens, {options.requests} requests, "
        f"{options.concurrency} at once;\nKV memory for two full prompts "
        f"({int(args[args.index('--kv-cache-memory-bytes') + 1]) / 2**20:.0f} MiB)\n"
    )
    print(table(rows))
    draw(rows, FOLDER / "demo.png")
    print(f"\n{time.monotonic() - began:.0f} s in all; as a picture: {FOLDER / 'demo.png'}")
    if options.output:
        result = {"rows": rows, **provenance()}
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    if rows["eviction"]["evictions"] < 2 * len(asked) + options.requests:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
