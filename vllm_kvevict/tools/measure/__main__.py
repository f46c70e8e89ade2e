"""``vllm-kvevict measure``: what a running server's answers lose at several budgets.

Asks questions with known answers (docs/quality.md), or scores recorded ones (docs/recorded.md).
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvevict.processes import guard

if TYPE_CHECKING:
    from vllm_kvevict.tools.measure.answers import Cell
    from vllm_kvevict.tools.measure.questions import Question
    from vllm_kvevict.tools.measure.server import Server

LOCAL = "http://127.0.0.1:8000"
BUDGETS = "50%,25%,12.5%"


def main(argv: list[str]) -> int:
    """Ask and print. Returns the exit status; errors are one sentence on stderr."""
    from vllm_kvevict.config.budget import parse_budget
    from vllm_kvevict.tools.measure.api import Refused
    from vllm_kvevict.tools.measure.traffic import run

    options = _parser().parse_args(argv)
    try:
        _check(options)
        chosen = options.budgets or ("" if options.recorded else BUDGETS)
        budgets = [str(parse_budget(one)) for one in chosen.split(",") if one.strip()]
        return run(options, budgets) if options.recorded else _measure(options, budgets)
    except (Refused, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together."""
    if (options.questions is None) == (options.recorded is None):
        raise ValueError("give a file of QUESTIONS, or --recorded FILE")
    if options.recorded is None and (options.push or options.textfile):
        raise ValueError("--push and --textfile need --recorded")
    if options.recorded is not None and options.policy:
        raise ValueError("--policy cannot be combined with --recorded; requests name their policy")
    if options.textfile is not None and options.textfile.suffix != ".prom":
        raise ValueError("--textfile must end in .prom, which the textfile collector reads")
    if options.concurrency < 1:
        raise ValueError("--concurrency must be at least 1")


def _measure(options: argparse.Namespace, budgets: list[str]) -> int:
    """Ask the questions and print the table. Returns the exit status."""
    from vllm_kvevict.tools.measure.answers import Answers, run_id
    from vllm_kvevict.tools.measure.questions import read
    from vllm_kvevict.tools.measure.server import FULL, KNOWN, NOT_KNOWN, Server
    from vllm_kvevict.tools.measure.table import advice, lines

    questions = read(options.questions)
    key = os.environ.get("OPENAI_API_KEY")
    server = Server(options.base_url, options.model, key, options.policy, options.max_tokens)
    cells = [(FULL, "")]
    cells += [(budget, asked) for budget in budgets for asked in (KNOWN, NOT_KNOWN)]
    run = run_id(questions, server.model, options.policy, options.max_tokens)
    answers = Answers(options.output, run, len(questions))
    for cell in cells:
        said = f"{len(questions)} questions, {' '.join(cell).strip()}"
        if cell in answers.cells:
            print(f"{said}: answered in {options.output}", file=sys.stderr)
            continue
        print(f"asking {said}", file=sys.stderr)
        answers.add(cell, _ask(server, questions, cell, options.concurrency))
    right = {
        cell: [
            one.is_right(answer) for one, answer in zip(questions, answers.cells[cell], strict=True)
        ]
        for cell in cells
    }
    full = right[cells[0]]
    rows = [(*cell, right[cell], full) for cell in cells]
    print("\n".join(lines(rows)))
    if len(rows) > 1:
        print(advice(rows))
    return 0


def _ask(server: "Server", questions: "list[Question]", cell: "Cell", at_once: int) -> list[str]:
    """Answers to all questions; the first refusal is raised, and the others are not waited for."""
    from vllm_kvevict.tools.measure.server import KNOWN

    budget, asked = cell
    threads = ThreadPoolExecutor(at_once)
    try:
        return list(threads.map(lambda one: server.answer(one, budget, asked == KNOWN), questions))
    finally:
        # An interrupt ends the command without what the server has not answered yet.
        threads.shutdown(wait=False, cancel_futures=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvevict measure",
        description="Answers of a running server to your own questions, with the full cache and at "
        "several budgets: with the question known at the eviction and not known. With --recorded, "
        "what recorded answers lose in nats per token. The server must run with "
        "--kv-eviction-allow none. An API key is read from OPENAI_API_KEY.",
    )
    parser.add_argument(
        "questions",
        nargs="?",
        type=Path,
        metavar="QUESTIONS",
        help="JSON Lines with context, question and answer (a text, or a list of texts that must "
        "all occur); optional: any_answer, answer_prefix, max_new_tokens.",
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="FILE",
        help="JSON Lines with request and response, bodies of completions or chat completions; "
        "optional: kind.",
    )
    parser.add_argument("--base-url", default=LOCAL, help=f"The server (default: {LOCAL}).")
    parser.add_argument(
        "--model",
        help="The model's name (default: the first that is served; of a "
        "recorded request, its own).",
    )
    parser.add_argument(
        "--budgets",
        help=f"Budgets separated by commas, shares or tokens (default: {BUDGETS}; of recorded "
        "requests, their own or the server's).",
    )
    parser.add_argument("--policy", help="The policy (default: the server's).")
    parser.add_argument("--max-tokens", type=int, default=64, help="Of an answer (default: 64).")
    parser.add_argument("--concurrency", type=int, default=8, help="Requests at once (default: 8).")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="Takes the answers of each budget when they are complete; a run that was interrupted "
        "goes on from it. With --recorded, a line for each request and budget at the end.",
    )
    parser.add_argument("--push", metavar="URL", help="Pushgateway that takes the recorded loss.")
    parser.add_argument(
        "--textfile",
        type=Path,
        metavar="FILE",
        help="The recorded loss for the textfile collector of the node exporter (FILE.prom).",
    )
    return parser


if __name__ == "__main__":
    guard()
    sys.exit(main(sys.argv[1:]))
