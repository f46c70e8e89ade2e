"""``vllm-kvevict measure QUESTIONS``: answers of a running server at several budgets. See
docs/quality.md."""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOCAL = "http://127.0.0.1:8000"
BUDGETS = "50%,25%,12.5%"


def main(argv: list[str]) -> int:
    """Ask and print. Returns the exit status; errors are one sentence on stderr."""
    from vllm_kvevict.config.budget import parse_budget
    from vllm_kvevict.tools.measure.questions import read
    from vllm_kvevict.tools.measure.server import FULL, KNOWN, NOT_KNOWN, Refused, Server
    from vllm_kvevict.tools.measure.table import lines

    options = _parser().parse_args(argv)
    try:
        budgets = [str(parse_budget(one)) for one in options.budgets.split(",") if one.strip()]
        questions = read(options.questions)
        key = os.environ.get("OPENAI_API_KEY")
        server = Server(options.base_url, options.model, key, options.policy, options.max_tokens)
        cells = [(FULL, "")]
        cells += [(budget, asked) for budget in budgets for asked in (KNOWN, NOT_KNOWN)]
        answers: dict[tuple[str, str], list[str]] = {}
        for cell in cells:
            print(f"asking {len(questions)} questions: {' '.join(cell)}", file=sys.stderr)
            with ThreadPoolExecutor(options.concurrency) as threads:
                budget, asked = cell
                # A generator of the first refusal: the others are not waited for.
                found = threads.map(
                    lambda one, budget=budget, asked=asked: server.answer(
                        one, budget, asked == KNOWN
                    ),
                    questions,
                )
                try:
                    answers[cell] = list(found)
                except Refused:
                    threads.shutdown(cancel_futures=True)
                    raise
        if options.output is not None:
            _write(options.output, answers)
    except (Refused, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    right = {
        cell: [one.is_right(answer) for one, answer in zip(questions, given, strict=True)]
        for cell, given in answers.items()
    }
    full = right[cells[0]]
    print("\n".join(lines([(*cell, right[cell], full) for cell in cells])))
    return 0


def _write(path: Path, answers: dict[tuple[str, str], list[str]]) -> None:
    with path.open("w") as out:
        for (budget, asked), given in answers.items():
            for index, answer in enumerate(given):
                row = {"budget": budget, "question": asked, "index": index, "answer": answer}
                out.write(json.dumps(row) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvevict measure",
        description="Answers of a running server to your own questions, with the full cache and at "
        "several budgets: with the question known at the eviction and not known. The server must "
        "run with --kv-eviction-allow none. An API key is read from OPENAI_API_KEY.",
    )
    parser.add_argument(
        "questions",
        type=Path,
        metavar="QUESTIONS",
        help="JSON Lines with context, question and answer (a text, or a list of texts that must "
        "all occur); optional: any_answer, answer_prefix, max_new_tokens.",
    )
    parser.add_argument("--base-url", default=LOCAL, help=f"The server (default: {LOCAL}).")
    parser.add_argument("--model", help="The model's name (default: the first that is served).")
    parser.add_argument(
        "--budgets",
        default=BUDGETS,
        help=f"Budgets separated by commas, shares or tokens (default: {BUDGETS}).",
    )
    parser.add_argument("--policy", help="The policy (default: the server's).")
    parser.add_argument("--max-tokens", type=int, default=64, help="Of an answer (default: 64).")
    parser.add_argument("--concurrency", type=int, default=8, help="Requests at once (default: 8).")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Writes all answers.")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
