"""`make demo`: what eviction does, on a real model, in the order of what convinces.

Starts `vllm serve` twice on KV memory for two full prompts: stock, and with `--kv-eviction auto`,
where requests may ask for the full cache. Each answer is shown as soon as it is there:

1. questions about long texts that were evicted before the question was known, with the full cache
   and evicted, both on the second server; and a page that shows which words of a text were kept;
2. six conversations of four turns, a turn of all before the next one: time to first token by turn;
3. one load by `vllm bench serve` on each server.

Each server first answers a question that is not counted, which also says how many questions and
requests this machine has time for. On a CPU without instructions for bfloat16 the servers compute
in float32, and the load asks for shorter answers.
"""

import argparse
import json
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from openai import OpenAI
from tqdm import tqdm

from benchmarks.chat.conversation import Conversation
from benchmarks.chat.dialogue import SUMMARIES, Dialogue
from benchmarks.chat.dialogue import Question as Turn
from benchmarks.facts import ASK, FACTS, Question, questions
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
"""As in README's command."""
CHARACTERS = 8000
"""Of a text that is asked about: about 1,800 tokens."""
CHATS, TURNS, CHAT_CHARACTERS = 6, 4, 7000
"""Conversations, their turns, and characters of what they are about: about 1,600 tokens."""
TURN_TOKENS = 24
"""Tokens of an answer in a conversation."""
EVERY = 32

SIZES = ((6, 8), (4, 6), (3, 4), (2, 4))
"""Questions and requests of the load, from what a machine does that is fast enough to what every
machine does. With fewer requests the servers hold the same number at once."""

TARGET_S = 300.0
"""Seconds that asking, conversations and the load may take where a smaller size takes no longer."""

NAMES = {"stock": "stock vLLM", "eviction": "--kv-eviction auto"}


def block_bytes(model: Path, dtype: str = "bfloat16") -> int:
    """Bytes of one block of the KV cache."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * BLOCK * 2 * config["head_dim"] * ITEM_SIZES[dtype]


def work(questions: int, requests: int) -> float:
    """Return the work of a size, in questions that compute their whole text.

    A question is asked twice, the second time over blocks that the first one left. Stock vLLM
    computes each turn of a conversation whole, the other server two of them.
    """
    return 1.5 * questions + CHATS * (TURNS + 2) + 2 * 2 * requests


def size_for(seconds: float) -> tuple[int, int]:
    """Return the questions and the requests for which this machine has time.

    Args:
        seconds: Time of a question.

    """
    fitting = (size for size in SIZES if seconds * work(*size) <= TARGET_S)
    return next(fitting, SIZES[-1])


def blocks(requests: int) -> int:
    """Blocks of so many full prompts with their answers, and the null block."""
    return requests * -(-(PROMPT + OUTPUT) // BLOCK) + 1


def server_args(model: Path, dtype: str, requests: int = 2) -> list[str]:
    """A server's arguments, with KV memory for so many full prompts with their answers."""
    return [
        "--dtype", dtype, "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2560", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(blocks(requests) * block_bytes(model, dtype)), "--seed", "0",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


WHOLE = {"kv_eviction": "none"}
AT_TEXT = {"kv_eviction_at": {"message": 0}}
"""``vllm_xargs`` of the two ways in which a question is asked: with the full cache, and with the
text, which is the first message, evicted before the question."""

OF_THE_LOAD = {"kv_eviction_every": 0}
"""Prompts of the load are no conversations: they are evicted at their end."""


def answer(server: Server, question: Question, xargs: dict[str, Any]) -> tuple[str, float]:
    """Return the answer to a question that follows its text, and the seconds that it took."""
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    began = time.monotonic()
    completion = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": text} for text in question.messages()],
        max_tokens=48,
        temperature=0,
        extra_body={"vllm_xargs": xargs} if xargs else {},
    )
    text = (completion.choices[0].message.content or "").strip()
    return text, time.monotonic() - began


def is_loop(text: str) -> bool:
    """Return True if a text says four words in a row three times or more."""
    words = text.lower().split()
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    return any(runs.count(run) >= 3 for run in set(runs))


def is_right(question: Question, text: str) -> bool:
    """Return True if an answer holds what it must, and is not a loop that happens to."""
    return question.right(text) and not is_loop(text)


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


def dialogues(count: int = CHATS) -> list[Dialogue]:
    """Conversations about different texts: the text's fact, then what fits every text."""
    return [
        Dialogue(
            f"{ASK}\n\n{one.text}",
            (Turn(one.question, TURN_TOKENS), *(Turn(text, TURN_TOKENS) for text in SUMMARIES[1:])),
        )
        for one in questions(count, CHAT_CHARACTERS)
    ]


@dataclass
class EvictingLoad(Load):
    """A load with ``vllm_xargs``, which stock vLLM is not sent."""

    def args(self) -> list[str]:
        return [*super().args(), "--extra-body", json.dumps({"vllm_xargs": OF_THE_LOAD})]


@dataclass(frozen=True)
class Demo:
    """The size of the comparison, and its parts.

    ``size`` is None for as many questions and requests as this machine has time for. ``output`` is
    the number of tokens that each request of the load generates.
    """

    model: Path
    dtype: str
    eviction: list[str]
    size: tuple[int | None, int | None]
    output: int = OUTPUT

    def run(self) -> dict[str, Any]:
        """Run all parts, and print each when it is there. Returns what a result file holds."""
        few = server_args(self.model, self.dtype)
        chain = ["--kv-eviction-every", str(EVERY), "--kv-eviction-allow", "none"]
        arguments = {"stock": few, "eviction": [*few, *self.eviction, *chain]}
        with ExitStack() as stack:
            print(
                f"Starting 2 vllm serve, a minute (logs: {FOLDER}/*.log). KV memory of each: two "
                f"full prompts ({blocks(2) * block_bytes(self.model, self.dtype) / 2**20:.0f} MiB)",
                flush=True,
            )
            servers = start(arguments, self.model, stack)
            seconds = self._warm_up(servers["eviction"], WHOLE)
            chosen = size_for(seconds)
            count, requests = (own or found for own, found in zip(self.size, chosen, strict=True))
            print(
                f"A question takes {seconds:.1f} s here: {count} questions and {requests} requests "
                f"of load, about {max(1, seconds * work(count, requests) / 60):.0f} min",
                flush=True,
            )
            rows = [self._ask(servers["eviction"], one) for one in questions(count, CHARACTERS)]
            right = {way: sum(one[way]["right"] for one in rows) for way in ("full", "evicted")}
            print(f"\nright: {right['full']} of {count} with the full cache, ", end="")
            print(f"{right['evicted']} evicted")
            evicted = [servers["eviction"].evictions()["evictions"]]
            page = self._page(rows[0]["question"])
            self._warm_up(servers["stock"], {})
            chats = {label: self._converse(server, label) for label, server in servers.items()}
            print(turns_table(chats), flush=True)
            evicted.append(servers["eviction"].evictions()["evictions"])
            load = {label: self._load(server, label, requests) for label, server in servers.items()}
            print(load_table(load), flush=True)
            evicted.append(servers["eviction"].evictions()["evictions"])
        least = (count, CHATS, requests)
        before = (0, *evicted)
        return {
            "asked": rows, "right": right, "page": str(page) if page else None,
            "ttft_s": chats, "load": load,
            "evictions": [b - a for a, b in zip(before, evicted, strict=False)],
            "evicted_all": all(
                b - a >= n for a, b, n in zip(before, evicted, least, strict=False)
            ),
        }  # fmt: skip

    def _warm_up(self, server: Server, xargs: dict[str, Any]) -> float:
        """Return the seconds of a question alone, after a short request and one that is not
        counted. Its text is not asked about later."""
        server.warm_up()
        *_, question = questions(len(FACTS), CHARACTERS)
        shorter = Question(question.text[:-100], question.question, question.holds)
        answer(server, shorter, xargs)
        _, seconds = answer(server, Question(question.text[100:], *_rest(question)), xargs)
        return seconds

    def _ask(self, server: Server, question: Question) -> dict[str, Any]:
        print(f"\n{question.question}", flush=True)
        found: dict[str, Any] = {"question": question.question}
        with tqdm(total=2, bar_format="{desc}", leave=False) as bar:
            for way, xargs in (("full", WHOLE), ("evicted", AT_TEXT)):
                bar.set_description(f"{NAMES['eviction']}: asking over HTTP")
                text, seconds = answer(server, question, xargs)
                mark = "right" if is_right(question, text) else "wrong"
                found[way] = {"text": text, "seconds": seconds, "right": mark == "right"}
                said = " ".join(text.split())
                tqdm.write(
                    textwrap.fill(
                        f"{said} ({mark})", 96, initial_indent=f"  {way:<9}",
                        subsequent_indent=" " * 11,
                    )
                )  # fmt: skip
        return found

    def _page(self, asked: str) -> Path | None:
        """Write the page of kept words of the first text; None if that failed."""
        (question,) = (one for one in questions(len(FACTS), CHARACTERS) if one.question == asked)
        text, page = FOLDER / "text.txt", FOLDER / "kept.html"
        text.write_text(question.messages()[0])
        fact = next(fact for fact, question_, _ in FACTS if question_ == asked)
        command = [
            sys.executable, "-m", "vllm_kvevict", "inspect", str(self.model), "--prompt-file",
            str(text), "--question", f"\n\n{question.messages()[1]}", "--chat", "--html",
            str(page), "--compare", "streaming-llm", "--find", fact, "--dtype", self.dtype,
            "--block-size", str(BLOCK), "--max-model-len", "2560",
            "--kv-cache-memory-bytes", str(blocks(2) * block_bytes(self.model, self.dtype)),
            *self.eviction,
        ]  # fmt: skip
        print("\nDrawing which words were kept, about a minute", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            print(f"no page: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
        print(f"Which words each policy kept of the first text: file://{page.absolute()}")
        return page

    def _converse(self, server: Server, label: str) -> list[float]:
        """Return the median seconds to the first token of each turn."""
        chats, found = [Conversation(one) for one in dialogues()], []
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)
        left = "{desc} |{bar}| {percentage:3.0f}% [{elapsed}<{remaining}]"
        with client, tqdm(total=CHATS * TURNS, bar_format=left, leave=False) as bar:
            bar.set_description(f"{NAMES[label]}: {CHATS} conversations")
            for _ in range(TURNS):
                answers = []
                for chat in chats:
                    answers.append(chat.ask(client, server.model, {}))
                    bar.update()
                found.append(median(one.ttft_s for one in answers))
        return found

    def _load(self, server: Server, label: str, requests: int) -> dict[str, float]:
        kind = EvictingLoad if label == "eviction" else Load
        with tqdm(total=requests, bar_format="{desc}", leave=False) as bar:
            bar.set_description(f"{NAMES[label]}: vllm bench serve")
            return measure(server, self.model, kind(PROMPT, self.output, requests, requests))


def _rest(question: Question) -> tuple[str, str]:
    return question.question, question.holds


def turns_table(ttft: dict[str, list[float]]) -> str:
    """Seconds to the first token by turn, of stock vLLM, with eviction, and their ratio."""
    stock, evicted = ttft["stock"], ttft["eviction"]
    pairs = list(enumerate(zip(stock, evicted, strict=True), 1))
    lines = [f"\n{CHATS} conversations, KV memory for two: median TTFT in seconds\n"]
    lines.append(f"{'turn':<24}" + "".join(f"{turn:>10}" for turn, _ in pairs))
    lines.append(f"{NAMES['stock']:<24}" + "".join(f"{a:>10.2f}" for _, (a, _) in pairs))
    lines.append(f"{NAMES['eviction']:<24}" + "".join(f"{b:>10.2f}" for _, (_, b) in pairs))
    ratios = (f"{b / a:.2f}x" for _, (a, b) in pairs)
    lines.append(f"{'ratio':<24}" + "".join(f"{text:>10}" for text in ratios))
    return "\n".join(lines)


LINES = (
    ("sequences at once", "peak_running", "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("TTFT median (ms)", "ttft_ms_median", "{:.0f}"),
    ("TPOT median (ms)", "tpot_ms_median", "{:.1f}"),
    ("preemptions", "preemptions", "{:.0f}"),
)
"""Title, key of a row, and how it is written."""


def load_table(load: dict[str, dict[str, float]]) -> str:
    """Return the rows of the load for both servers, with the ratio of eviction to stock."""
    count = int(load["stock"]["completed"])
    lines = [f"\nLoad: {count} prompts of {PROMPT} tokens at once\n"]
    lines.append(f"{'':<24}{NAMES['stock']:>20}{NAMES['eviction']:>20}{'ratio':>10}")
    for title, key, form in LINES:
        stock, evicted = load["stock"][key], load["eviction"][key]
        ratio = f"{evicted / stock:.2f}x" if stock else "-"
        lines.append(f"{title:<24}{form.format(stock):>20}{form.format(evicted):>20}{ratio:>10}")
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> str:
    """All parts as text, for the result file."""
    parts = []
    for one in found["asked"]:
        parts.append(one["question"])
        for way in ("full", "evicted"):
            mark = "right" if one[way]["right"] else "wrong"
            parts.append(f"  {way:<9}{' '.join(one[way]['text'].split())} ({mark})")
    return "\n".join([*parts, turns_table(found["ttft_s"]), load_table(found["load"])])


def draw(found: dict[str, Any], path: Path) -> None:
    """Bars of right answers, of times to first tokens by turn, and of the load."""
    figure, (right, turns, load) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    colors = {"stock": "#9e9e9e", "eviction": "#3182bd"}
    bars = right.bar(["full", "evicted"], found["right"].values(), color=[*colors.values()])
    right.bar_label(bars)
    right.set_title(f"right of {len(found['asked'])}, asked later", fontsize=9)
    for place, (label, color) in enumerate(colors.items()):
        at = [turn + 0.4 * place for turn in range(1, TURNS + 1)]
        turns.bar(at, found["ttft_s"][label], 0.4, color=color, label=NAMES[label])
    turns.set_title("median TTFT by turn, s", fontsize=9)
    turns.legend(fontsize=7)
    values = [found["load"][label]["output_tokens_per_s"] for label in colors]
    load.bar_label(load.bar([*NAMES.values()], values, color=[*colors.values()]), fmt="%.1f")
    load.set_title("output tokens/s of the load", fontsize=9)
    for place in (right, turns, load):
        for side in ("top", "right"):
            place.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
    found = Demo(model, dtype, eviction, size, SHORT_OUTPUT if slow else OUTPUT).run()
    draw(found, FOLDER / "demo.png")
    seconds = time.monotonic() - began
    print(f"\n{seconds:.0f} s in all; as a picture: {FOLDER / 'demo.png'}")
    if options.output:
        origin = provenance()
        options.output.write_text(json.dumps({**found, **origin}, indent=2) + "\n")
        text = markdown(summary(found), seconds, origin)
        options.output.with_suffix(".md").write_text(text)
    if not found["evicted_all"]:
        print("Not every prompt was evicted: this is a defect.", file=sys.stderr)
        return 1
    return 0 if found["page"] else 1


if __name__ == "__main__":
    sys.exit(main())
