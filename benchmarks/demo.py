"""`make demo`: the same questions and load on the same KV memory, without and with eviction.

Starts `vllm serve` twice with KV memory for two full prompts, asks it for needles in long
prompts over HTTP through the OpenAI client, drives it with `vllm bench serve`, and prints one
table.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI
from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.provenance import provenance
from benchmarks.quality.options import SHIPPED
from benchmarks.quality.tasks import Sample, make
from benchmarks.server import Server

TASKS = ("s-niah", "mk-niah", "lines")
PROMPT, OUTPUT, BLOCK = 2048, 192, 32
LAYERS, KV_HEADS, HEAD_SIZE, FLOAT32 = 4, 4, 32, 4
BLOCK_BYTES = LAYERS * KV_HEADS * BLOCK * 2 * HEAD_SIZE * FLOAT32
KV_BLOCKS = 2 * -(-(PROMPT + OUTPUT) // BLOCK) + 1


def server_args() -> list[str]:
    """Both servers' arguments: KV memory for two full prompts with their answers."""
    return [
        "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(KV_BLOCKS * BLOCK_BYTES), "--seed", "0",
    ]  # fmt: skip


def questions(each: int) -> list[Sample]:
    """Needles and lines hidden in prompts of about the load's length."""
    return [make(task, PROMPT - 100, seed) for seed in range(each) for task in TASKS]


def ask(server: Server, model: Path, samples: list[Sample]) -> list[str]:
    """Chat answers through the OpenAI client, eight questions at once."""
    client = OpenAI(base_url=server.url + "/v1", api_key="none")

    def answer(sample: Sample) -> str:
        completion = client.chat.completions.create(
            model=str(model),
            messages=[{"role": "user", "content": f"{sample.context}\n{sample.question}"}],
            max_tokens=16,
            temperature=0,
        )
        return completion.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(answer, samples))


def run(
    label: str, args: list[str], model: Path, load: Load, samples: list[Sample], bar: tqdm
) -> dict:
    log = Path(".cache") / "demo" / f"{label}.log"
    bar.set_description(f"{label}: starting vllm serve (log: {log})")
    with Server(model, args, log) as server:
        bar.update()
        bar.set_description(f"{label}: asking over HTTP")
        answers = ask(server, model, samples)
        bar.update()
        bar.set_description(f"{label}: vllm bench serve, {load.num_prompts} requests")
        row = measure(server, model, load)
        bar.update()
    right = sum(sample.score(text) for sample, text in zip(samples, answers, strict=True))
    return {**row, **server.evictions(), "right": right, "answers": answers}


def table(rows: dict[str, dict]) -> str:
    """The comparison as text, with the ratio eviction / stock."""
    lines = [
        ("questions answered right", "right", "{:.0f}"),
        ("peak running sequences", "peak_running", "{:.0f}"),
        ("preemptions", "preemptions", "{:.0f}"),
        ("output tokens/s", "output_tokens_per_s", "{:.0f}"),
        ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
        ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
        ("evictions", "evictions", "{:.0f}"),
        ("blocks freed", "blocks_freed", "{:.0f}"),
    ]
    stock, evict = rows["stock"], rows["eviction"]
    out = [f"{'':<24}{'stock vLLM':>12}{'--kv-eviction':>15}{'ratio':>8}"]
    for title, key, form in lines:
        a, b = stock.get(key, 0), evict.get(key, 0)
        ratio = f"{b / a:.2f}x" if a else "-"
        out.append(f"{title:<24}{form.format(a):>12}{form.format(b):>15}{ratio:>8}")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="ada-snapkv")
    parser.add_argument("--budget", default=str(PROMPT // 8))
    parser.add_argument("--questions", type=int, default=8, help="of each kind")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()

    model, samples = SHIPPED, questions(options.questions)
    load = Load(PROMPT, OUTPUT, options.requests, options.concurrency)
    eviction = ["--kv-eviction", options.policy, "--kv-eviction-budget", options.budget]
    began = time.monotonic()
    with tqdm(total=6, bar_format="{desc} [{n_fmt}/{total_fmt}, {elapsed}]") as bar:
        rows = {
            "stock": run("stock", server_args(), model, load, samples, bar),
            "eviction": run("eviction", server_args() + eviction, model, load, samples, bar),
        }
    print(
        f"\n{PROMPT}-token prompts, {OUTPUT} new tokens, {options.requests} requests, "
        f"{options.concurrency} at once;\nKV memory for two full prompts "
        f"({KV_BLOCKS * BLOCK_BYTES / 2**20:.0f} MiB); budget {options.budget}, "
        f"policy {options.policy}\n"
    )
    print(table(rows))
    print(f"\nOf {len(samples)} questions about {PROMPT - 100}-word texts, for instance:")
    for index, sample in enumerate(samples[: len(TASKS)]):
        print(f"  {sample.question}  expected: {', '.join(sample.answers)}")
        for label, row in rows.items():
            print(f"    {label:<10}{row['answers'][index]}")
    print(f"\n{time.monotonic() - began:.0f} s in all")
    if options.output:
        result = {"rows": rows, **provenance()}
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    if rows["eviction"]["evictions"] < len(samples) + options.requests:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
