"""``python -m benchmarks.chat``: chats of several turns over a document each, over HTTP.

    python -m benchmarks.chat [--servers stock,at] [--chats 16] [--turns 2] [--think 0]

The first turn of a chat asks for a summary, every other one for a number that stands in the
document. Each turn sends the whole conversation, as clients of chat completions do. With
``--sessions`` several chats share a document. (The shape is SCBench's, arXiv:2412.10319.) With
``--turn-tokens`` each later turn brings so many tokens of new text, as agents' turns do, and asks
for a number of any earlier turn.
Servers start one after the other; the machine should be idle.
"""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from benchmarks.chat.dialogue import (
    Dialogue,
    Question,
    for_base_model,
    make,
    make_growing,
)
from benchmarks.chat.measure import measure, missing
from benchmarks.chat.report import markdown, plot
from benchmarks.chat.servers import PLAIN, ROWS, Setting
from benchmarks.demo import ITEM_SIZES
from benchmarks.provenance import provenance, used
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tasks import characters_for
from benchmarks.smollm2 import real_model
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.cpu_dtype import fast_dtype

STORE_DTYPES = get_args(EvictionConfig.model_fields["store_dtype"].annotation)

RESULT = Path(__file__).parents[1] / "results" / "chat.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat")
    add = parser.add_argument
    add("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    add("--servers", default=",".join(ROWS), help=f"rows of the table: {', '.join(ROWS)}")
    add("--memory", type=int, default=2, help="longest chats that the KV cache holds whole")
    add("--chats", type=int, default=16)
    add("--turns", type=int, default=2, help="of a chat, 2 or more")
    add("--sessions", type=int, default=1, help="chats about each document")
    add("--at-once", type=int, default=8, help="users; each has one chat after the other")
    add("--think", type=float, default=0, help="seconds between the turns of a chat")
    add("--rounds", action="store_true", help="turn 2 begins when all chats have had turn 1")
    add("--prompt-tokens", type=int, default=1500, help="of the first turn, about")
    add("--turn-tokens", type=int, default=0, help="of the text that each later turn brings, about")
    add("--summary-tokens", type=int, default=64, help="of the first answer")
    add("--policy", default="auto")
    add("--budget", default="25%", help="tokens per KV head, or a share")
    add("--profile", default="auto", help="a file, auto, or none")
    add("--store-memory", default="4G", help="host memory for stores, of `tiers`")
    add("--store-dtype", choices=STORE_DTYPES, default="auto", help="of stored tokens")
    add("--every", type=int, default=128, help="tokens between evictions, of `every`")
    add("--dtype", choices=ITEM_SIZES, default="", help="default: what this CPU computes fast")
    add("--seed", type=int, default=0)
    add("--work", type=Path, default=Path(".cache/chat"), help="folder of logs and stores")
    add("--out", type=Path, default=RESULT, help="table and picture are written beside it")
    options = parser.parse_args(arguments)
    options.servers = options.servers.split(",")
    if unknown := set(options.servers) - set(ROWS):
        parser.error(f"--servers: unknown {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    if min(options.chats, options.sessions, options.at_once, options.memory) < 1:
        parser.error("--chats, --sessions, --at-once and --memory: 1 or more")
    if options.turns < 2:
        parser.error("--turns: 2 or more")
    if options.turn_tokens and options.sessions > 1:
        parser.error("--turn-tokens: chats that grow share no document; omit --sessions")
    options.dtype = options.dtype or fast_dtype()
    return options


def dialogues(options: argparse.Namespace, chat: LocalChat) -> tuple[list[Dialogue], Dialogue]:
    """The chats of a run, and one more about another document to warm servers up."""

    def count(one: RulerSample) -> int:
        return len(chat.tokenize(Dialogue(one.context, (Question(one.question, 0),)).messages([])))

    characters = characters_for("s-niah", options.prompt_tokens, count)
    shape = dict(turns=options.turns, characters=characters, summary_tokens=options.summary_tokens)
    if options.turn_tokens:
        shape["passage"] = options.turn_tokens * characters // options.prompt_tokens
        grown = make_growing(options.chats, seed=options.seed, **shape)
        return grown, make_growing(1, seed=options.seed - 1, **shape)[0]
    made = make(options.chats, sessions=options.sessions, seed=options.seed, **shape)
    return made, make(1, sessions=1, seed=options.seed - 1, **shape)[0]


def longest(made: list[Dialogue], chat: LocalChat) -> int:
    """Tokens of the longest chat with all its answers."""

    def tokens(dialogue: Dialogue) -> int:
        answers = [""] * (len(dialogue.questions) - 1)
        spoken = sum(question.max_tokens for question in dialogue.questions)
        return len(chat.tokenize(dialogue.messages(answers))) + spoken

    return max(map(tokens, made))


def write(output: Path, result: dict[str, Any]) -> None:
    """JSON, and beside it the table and the picture."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(result))
    if result["rows"]:
        plot(result, output.with_suffix(".png"))


def main() -> None:
    options = parse()
    model = options.model or real_model()
    chat = LocalChat(model)
    made, warm_up = dialogues(options, chat)
    if not chat.has_template:
        made, warm_up = list(map(for_base_model, made)), for_base_model(warm_up)
    tokens = longest([*made, warm_up], chat)
    setting = Setting(
        model, tokens, options.memory, max(16, options.at_once), options.policy,
        options.budget, options.profile, options.store_memory, options.every, options.dtype,
        options.work, "" if chat.has_template else PLAIN, options.store_dtype,
    )  # fmt: skip
    result: dict[str, Any] = {
        "options": {key: str(value) for key, value in vars(options).items()},
        **provenance(),
        "load": f"{options.chats} chats of {options.turns} turns, "
        + (f"{options.turn_tokens} tokens each, " if options.turn_tokens else "")
        + f"{options.sessions} a document, "
        f"{options.at_once} at once, {options.think:g} s between turns, memory for "
        f"{options.memory} chats of {tokens} tokens, budget {options.budget}, {options.dtype}"
        + (f", {options.store_dtype} stores" if options.store_dtype != "auto" else ""),
        "tokens": tokens,
        "rows": [],
        "failed": [],
    }
    with tqdm(total=len(options.servers) * options.chats * options.turns, unit="answer") as bar:
        for name in options.servers:
            bar.set_description(name)
            try:
                row = measure(
                    name, setting, made, warm_up, options.at_once, options.think, options.rounds,
                    bar.update,
                )  # fmt: skip
            except Exception as error:
                reason = (str(error).strip() or repr(error)).splitlines()[-1]
                result["failed"].append({"server": name, "reason": reason})
            else:
                result["rows"].append(row)
                if none := missing(name, row["counted"]):
                    reason = f"{', '.join(none)} of its counters stayed 0"
                    result["failed"].append({"server": name, "reason": reason})
            # What was measured is kept, whatever becomes of the next server.
            result |= used()
            write(options.out, result)
    print(options.out.with_suffix(".md").read_text())
    if result["failed"]:
        raise SystemExit("Not every server did what its row says: see the last lines above.")


if __name__ == "__main__":
    main()
