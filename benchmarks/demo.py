"""`make demo`: a real model answers the same questions and load, without and with eviction.

Starts `vllm serve` three times: stock, with `--kv-eviction auto`, and with it at half the budget in
four bits, each on KV memory for two full prompts; and once more, stock with as much as all requests
want, which is the limit. Asks the first three about long English texts through the OpenAI client,
where the question is known when the text is evicted and where it is not, drives each with
`vllm bench serve`, and prints and draws one comparison.
A first request says how many questions and requests this machine has time for. On a CPU without
instructions for bfloat16 the servers compute in float32, the load asks for shorter answers, and the
limit is not measured.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
from openai import OpenAI
from tqdm import tqdm

from benchmarks.facts import FACTS, Question, questions
from benchmarks.load import Load, measure
from benchmarks.provenance import provenance, sentence
from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model
from vllm_kvevict.serving.cpu_dtype import FASTER, fast_dtype

PROMPT, OUTPUT, BLOCK = 2048, 128, 32
SHORT_OUTPUT = 64
"""Tokens of an answer of the load on a CPU without instructions for bfloat16."""
ITEM_SIZES = {"bfloat16": 2, "float32": 4}
FOLDER = Path(".cache") / "demo"
POLICY, BUDGET = "auto", "25%"
"""As in the first command of README, and as ``auto`` without a budget."""
FEW_BITS = ["--kv-eviction-budget", "12.5%", "--kv-eviction-store-dtype", "int4"]
"""Flags of the server with four-bit stores, after those of the other server that evicts."""
CHARACTERS = 8000
"""Of a text: about 1,800 tokens."""


ASKED, LOADED = 6, 2
"""Full prompts' work for a question (to three servers, known and not known), and for a request of
the load to one server, with a longer answer."""

SIZES = ((6, 8), (5, 6), (4, 6), (4, 5), (3, 4), (2, 4))
"""Questions and requests of the load, from what a machine does that is fast enough to what every
machine does. With fewer requests the servers hold the same number at once."""

TARGET_S = 300.0
"""Seconds that asking and the load may take where a smaller size takes no longer."""


def block_bytes(model: Path, dtype: str = "bfloat16") -> int:
    """Bytes of one block of the KV cache."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * BLOCK * 2 * config["head_dim"] * ITEM_SIZES[dtype]


def size_for(seconds: float, servers: int) -> tuple[int, int]:
    """Return the questions and the requests for which this machine has time.

    Args:
        seconds: Time of a first request.
        servers: Number of servers that get the load.

    """
    fitting = (size for size in SIZES if seconds * work(*size, servers) <= TARGET_S)
    return next(fitting, SIZES[-1])


def work(questions: int, requests: int, servers: int) -> int:
    """Return the work of a size, in requests like the first, if so many servers get the load."""
    return ASKED * questions + LOADED * requests * servers


NAMES = {
    "stock": "stock vLLM",
    "eviction": "--kv-eviction auto",
    "few_bits": "auto, 12.5%, int4",
    "limit": "stock, all memory",
}
"""The servers; the last has memory for every request of the load at once."""


EVICTING = "eviction", "few_bits"
RATIO = "auto / stock"
"""Title of the last column: the second column divided by the first."""


def blocks(requests: int) -> int:
    """Blocks of so many full prompts with their answers, and the null block."""
    return requests * -(-(PROMPT + OUTPUT) // BLOCK) + 1


def server_args(model: Path, dtype: str, requests: int = 2) -> list[str]:
    """A server's arguments, with KV memory for so many full prompts with their answers."""
    return [
        "--dtype", dtype, "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(blocks(requests) * block_bytes(model, dtype)), "--seed", "0",
    ]  # fmt: skip


AT_FIRST_MESSAGE = {"vllm_xargs": {"kv_eviction_at": {"message": 0}}}
"""Evicts at the end of a chat's first message."""


def answer(server: Server, model: Path, question: Question, known: bool, evicts: bool) -> str:
    """One chat answer through the OpenAI client.

    ``known`` says whether the question is in the prompt that is evicted; else it comes after the
    text was evicted, in a message of its own. Stock vLLM refuses mappings in ``vllm_xargs``.
    """
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    texts = [question.message()] if known else question.messages()
    completion = client.chat.completions.create(
        model=str(model),
        messages=[{"role": "user", "content": text} for text in texts],
        max_tokens=48,
        temperature=0,
        extra_body={} if known or not evicts else AT_FIRST_MESSAGE,
    )
    return (completion.choices[0].message.content or "").strip()


def first_request(server: Server, model: Path) -> float:
    """Return the seconds that a question takes alone, about a text that is not asked about later.

    A server's first request takes longer than the others, so it gets a short one before.
    """
    server.warm_up()
    *_, question = questions(len(FACTS), CHARACTERS)
    began = time.monotonic()
    answer(server, model, question, known=True, evicts=False)
    return time.monotonic() - began


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


def told(
    server: Server, model: Path, asked: list[Question], evicts: bool, done: Callable[[], object]
) -> dict:
    """Answers of a server to four questions at once, and the number of right ones."""

    def one(question: Question, known: bool) -> str:
        text = answer(server, model, question, known, evicts)
        done()
        return text

    with ThreadPoolExecutor(4) as threads:
        answers = {
            known: list(threads.map(partial(one, known=known), asked)) for known in (True, False)
        }
    right = {
        known: sum(one.right(text) for one, text in zip(asked, texts, strict=True))
        for known, texts in answers.items()
    }
    return {
        "questions": len(asked),
        "right": right[True],
        "right_unknown": right[False],
        "answers": answers[True],
        "later": answers[False],
    }


@dataclass(frozen=True)
class Demo:
    """The size of the comparison, and its rows.

    ``size`` is None for as many questions and requests as this machine has time for. ``limit`` says
    whether there is a server with memory for all requests. ``output`` is the number of tokens that
    each request of the load generates.
    """

    model: Path
    dtype: str
    eviction: list[str]
    size: tuple[int | None, int | None]
    limit: bool = True
    output: int = OUTPUT

    def run(self) -> tuple[list[Question], dict[str, dict]]:
        """The questions, and a row for each server, of :data:`NAMES`.

        The last server is not asked, as it answers like the first.
        """
        few = server_args(self.model, self.dtype)
        most = max(requests for _, requests in (*SIZES, (0, self.size[1] or 0)))
        arguments = {
            "stock": few,
            "eviction": few + self.eviction,
            "few_bits": few + self.eviction + FEW_BITS,
        }
        if self.limit:
            arguments["limit"] = server_args(self.model, self.dtype, most)
        with ExitStack() as stack:
            started = f"Starting {len(arguments)} vllm serve, a minute (logs: {FOLDER}/*.log)"
            print(started, flush=True)
            servers = start(arguments, self.model, stack)
            seconds = first_request(servers["stock"], self.model)
            chosen = size_for(seconds, len(servers))
            count, requests = (own or found for own, found in zip(self.size, chosen, strict=True))
            expected = seconds * work(count, requests, len(servers)) / 60
            print(
                f"A first question took {seconds:.1f} s: {count} questions and {requests} requests "
                f"of load, about {max(1, expected):.0f} min",
                flush=True,
            )
            asked = questions(count, CHARACTERS)
            return asked, self._rows(servers, asked, Load(PROMPT, self.output, requests, requests))

    def _rows(self, servers: dict[str, Server], asked: list[Question], load: Load) -> dict:
        rows: dict[str, dict] = {}
        left = "{desc} |{bar}| {percentage:3.0f}% [{elapsed}<{remaining}]"
        total = work(len(asked), load.num_prompts, len(servers))
        with tqdm(total=total, bar_format=left) as bar:
            for label in ("stock", *EVICTING):
                bar.set_description(f"{NAMES[label]}: asking over HTTP")
                evicts = label in EVICTING
                rows[label] = told(servers[label], self.model, asked, evicts, bar.update)
            # One at a time: they share the machine.
            for label, server in servers.items():
                bar.set_description(f"{NAMES[label]}: vllm bench serve")
                end = bar.n + load.num_prompts * LOADED

                def finished(ended: int, end: int = end) -> None:
                    bar.update(min(ended * LOADED, end - bar.n))

                found = measure(server, self.model, load, finished)
                bar.update(end - bar.n)
                rows[label] = rows.get(label, {}) | found | server.evictions()
        return rows


FIRST = (
    ("sequences at once", "peak_running", "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
)
"""Lines that are printed before everything else."""

LINES = (
    *FIRST,
    ("requests", "completed", "{:.0f}"),
    ("questions", "questions", "{:.0f}"),
    ("right, question known", "right", "{:.0f}"),
    ("right, not known", "right_unknown", "{:.0f}"),
    ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
    ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("evictions", "evictions", "{:.0f}"),
    ("blocks freed", "blocks_freed", "{:.0f}"),
)
"""Title, key of a row, and how it is written."""

DRAWN = "peak_running", "output_tokens_per_s", "right", "right_unknown", "ttft_ms_median"


def shown_names(rows: dict[str, dict]) -> dict[str, str]:
    """Labels and names of the servers that have rows."""
    return {label: name for label, name in NAMES.items() if label in rows}


def table(rows: dict[str, dict], lines: tuple[tuple[str, str, str], ...] = LINES) -> str:
    """The comparison as text, with the ratio of eviction to stock on the same memory."""
    names = shown_names(rows)
    out = [f"{'':<24}" + "".join(f"{name:>20}" for name in names.values()) + f"{RATIO:>14}"]
    for title, key, form in lines:
        values = [rows[label].get(key) for label in names]
        ratio = f"{values[1] / values[0]:.2f}x" if values[0] and values[1] is not None else "-"
        texts = ["-" if value is None else form.format(value) for value in values]
        cells = "".join(f"{text:>20}" for text in texts)
        out.append(f"{title:<24}{cells}{ratio:>14}")
    return "\n".join(out)


def draw(rows: dict[str, dict], path: Path) -> None:
    """Bars of what the table compares first."""
    figure, axes = plt.subplots(1, 5, figsize=(13, 3.2), layout="constrained")
    shown, names = [line for line in LINES if line[1] in DRAWN], shown_names(rows)
    for place, (title, key, form) in zip(axes, shown, strict=True):
        values = [rows[label].get(key) for label in names]
        heights = [value or 0 for value in values]
        colors = ["#9e9e9e", "#3182bd", "#31a354", "#d9d9d9"][: len(names)]
        bars = place.bar(range(len(names)), heights, color=colors)
        texts = ["not asked" if value is None else form.format(value) for value in values]
        place.bar_label(bars, texts, fontsize=8)
        place.set_title(title, fontsize=9)
        place.set_xticks(range(len(names)), names.values(), fontsize=7, rotation=20)
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
            ("few_bits", "answers", "int4"),
            ("few_bits", "later", "int4, later"),
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
    parser.add_argument("--questions", type=int, help="default: as this machine has time for")
    parser.add_argument("--requests", type=int, help="of the load, all at once; default: likewise")
    parser.add_argument("--dtype", choices=ITEM_SIZES, help="default: what this CPU computes fast")
    parser.add_argument("--output", type=Path, help="JSON file, and a Markdown file")
    options = parser.parse_args()

    try:
        model = real_model()
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    dtype = options.dtype or fast_dtype()
    slow = fast_dtype() == "float32"
    if options.dtype is None and slow:
        print(f"This CPU has no bfloat16 instructions: {FASTER}")
    eviction = ["--kv-eviction", options.policy, "--kv-eviction-budget", options.budget]
    began = time.monotonic()
    size = options.questions, options.requests
    output = SHORT_OUTPUT if slow else OUTPUT
    asked, rows = Demo(model, dtype, eviction, size, limit=not slow, output=output).run()
    requests = int(rows["eviction"]["completed"])
    memory = f"{blocks(2) * block_bytes(model, dtype) / 2**20:.0f} MiB"
    shown = "\n".join(
        [
            f"On KV memory for two full prompts ({memory}):\n",
            table(rows, FIRST),
            f"\nSmolLM2-135M-Instruct about texts of {CHARACTERS:,} characters, "
            f"--kv-eviction {options.policy} --kv-eviction-budget {options.budget},\n"
            f"and with {' '.join(FEW_BITS)}:",
            side_by_side(asked, rows),
            f"\nLoad: {PROMPT}-token prompts, {output} new tokens, {requests} requests, "
            f"all at once, in {dtype};\nKV memory for two full prompts ({memory})\n",
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
    if min(rows[label]["evictions"] for label in EVICTING) < 2 * len(asked) + requests:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
