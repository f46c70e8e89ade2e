"""`make demo`: a real model answers the same questions and load, without and with eviction.

Starts `vllm serve` twice with KV memory for two full prompts, asks it about long English texts in
chat form through the OpenAI client, drives it with `vllm bench serve`, and prints the answers side
by side and one table.
"""

import argparse
import json
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI
from tqdm import tqdm

from benchmarks.facts import FACTS, Question, questions
from benchmarks.load import Load, measure
from benchmarks.provenance import provenance
from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model

PROMPT, OUTPUT, BLOCK = 2048, 192, 32
CHARACTERS = 8000
"""Of a text: about 1,800 tokens."""


def block_bytes(model: Path) -> int:
    """Bytes of one block of the KV cache in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * BLOCK * 2 * config["head_dim"] * 2


def server_args(model: Path) -> list[str]:
    """Both servers' arguments: KV memory for two full prompts with their answers."""
    blocks = 2 * -(-(PROMPT + OUTPUT) // BLOCK) + 1
    return [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(blocks * block_bytes(model)), "--seed", "0",
    ]  # fmt: skip


def ask(server: Server, model: Path, asked: list[Question]) -> list[str]:
    """Chat answers through the OpenAI client, four questions at once."""
    client = OpenAI(base_url=server.url + "/v1", api_key="none")

    def answer(question: Question) -> str:
        completion = client.chat.completions.create(
            model=str(model),
            messages=[{"role": "user", "content": question.message()}],
            max_tokens=48,
            temperature=0,
        )
        return (completion.choices[0].message.content or "").strip()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(answer, asked))


def run(
    label: str, args: list[str], model: Path, load: Load, asked: list[Question], bar: tqdm
) -> dict:
    log = Path(".cache") / "demo" / f"{label}.log"
    bar.set_description(f"{label}: starting vllm serve (log: {log})")
    with Server(model, args, log) as server:
        bar.update()
        bar.set_description(f"{label}: asking over HTTP")
        answers = ask(server, model, asked)
        bar.update()
        bar.set_description(f"{label}: vllm bench serve, {load.num_prompts} requests")
        row = measure(server, model, load)
        bar.update()
    right = sum(question.right(text) for question, text in zip(asked, answers, strict=True))
    return {**row, **server.evictions(), "right": right, "answers": answers}


def table(rows: dict[str, dict]) -> str:
    """The comparison as text, with the ratio eviction / stock."""
    lines = [
        ("questions answered right", "right", "{:.0f}"),
        ("peak running sequences", "peak_running", "{:.0f}"),
        ("preemptions", "preemptions", "{:.0f}"),
        ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
        ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
        ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
        ("evictions", "evictions", "{:.0f}"),
        ("blocks freed", "blocks_freed", "{:.0f}"),
    ]
    stock, evict = rows["stock"], rows["eviction"]
    out = [f"{'':<26}{'stock vLLM':>12}{'--kv-eviction':>15}{'ratio':>8}"]
    for title, key, form in lines:
        a, b = stock.get(key, 0), evict.get(key, 0)
        ratio = f"{b / a:.2f}x" if a else "-"
        out.append(f"{title:<26}{form.format(a):>12}{form.format(b):>15}{ratio:>8}")
    return "\n".join(out)


def side_by_side(asked: list[Question], rows: dict[str, dict]) -> str:
    """Every question with the answers of both servers."""
    lines = []
    for index, question in enumerate(asked):
        lines.append(f"\n{question.question}")
        for label, name in (("stock", "stock vLLM"), ("eviction", "--kv-eviction")):
            text = " ".join(rows[label]["answers"][index].split())
            lines.append(textwrap.fill(text, 96, initial_indent=f"  {name:<15}",
                                       subsequent_indent=" " * 17))  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="ada-defensive")
    parser.add_argument("--budget", default=str(PROMPT // 4))
    parser.add_argument("--questions", type=int, default=len(FACTS))
    parser.add_argument("--requests", type=int, default=16)
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
    with tqdm(total=6, bar_format="{desc} [{n_fmt}/{total_fmt}, {elapsed}]") as bar:
        rows = {
            "stock": run("stock", args, model, load, asked, bar),
            "eviction": run("eviction", args + eviction, model, load, asked, bar),
        }
    print(f"\nSmolLM2-135M-Instruct about texts of {CHARACTERS:,} characters, budget "
          f"{options.budget} tokens per head, policy {options.policy}:")  # fmt: skip
    print(side_by_side(asked, rows))
    print(
        f"\nLoad: {PROMPT}-token prompts, {OUTPUT} new tokens, {options.requests} requests, "
        f"{options.concurrency} at once;\nKV memory for two full prompts "
        f"({int(args[args.index('--kv-cache-memory-bytes') + 1]) / 2**20:.0f} MiB)\n"
    )
    print(table(rows))
    print(f"\n{time.monotonic() - began:.0f} s in all")
    if options.output:
        result = {"rows": rows, **provenance()}
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    if rows["eviction"]["evictions"] < len(asked) + options.requests:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
