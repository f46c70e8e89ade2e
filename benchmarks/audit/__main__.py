"""``python -m benchmarks.audit``: is the audit right, does it tell, and what does it cost?

    python -m benchmarks.audit --part answers [--samples 100] [--minutes 0]
    python -m benchmarks.audit --part oracle [--prompts 12]
    python -m benchmarks.audit --part cost [--rounds 5]

A part adds its result to the result file, in the place of an earlier one of its own. `answers` and
`oracle` run vLLM in this process; `cost` starts servers and needs an idle machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.audit import answers, cost, oracle
from benchmarks.audit.prompts import KINDS
from benchmarks.audit.report import markdown, plot
from benchmarks.load import Load
from benchmarks.provenance import provenance, used
from benchmarks.smollm2 import real_model

RESULT = Path(__file__).parents[1] / "results" / "audit.json"
PARTS = ("answers", "oracle", "cost")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    add = parser.add_argument
    add("--part", choices=PARTS, required=True)
    add("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    add("--policies", default="ada-defensive,probe", help="the last one is that of `cost`")
    add("--budgets", default="6.25%,12.5%,25%,50%", help="shares of the prompt")
    add("--kinds", default="all", help=f"numbers from 0 of: {'; '.join(KINDS)}")
    add("--tokens", type=int, default=1300, help="of a prompt, about")
    add("--samples", type=int, default=100, help="prompts of a cell of `answers`")
    add("--first", type=int, default=0, help="the first prompt of a cell of `answers`")
    add("--minutes", type=float, default=0, help="most of each policy of `answers`; 0: no limit")
    add("--prompts", type=int, default=12, help="of `oracle`")
    add("--shares", default="1%,100%", help="of requests that `cost` audits, beside none")
    add("--budget", default="25%", help="of `cost`")
    add("--requests", type=int, default=100, help="of a load of `cost`")
    add("--at-once", type=int, default=8, help="requests of a load of `cost`")
    add("--input", type=int, default=512, help="tokens of a prompt of `cost`")
    add("--output", type=int, default=160, help="tokens of an answer of `cost`")
    add("--rounds", type=int, default=5, help="loads of each server of `cost`")
    add("--work", type=Path, default=Path(".cache/audit"), help="folder of the servers' logs")
    add("--out", type=Path, default=RESULT, help="table and picture are written beside it")
    options = parser.parse_args(arguments)
    options.policies = options.policies.split(",")
    options.budgets, options.shares = options.budgets.split(","), options.shares.split(",")
    chosen = range(len(KINDS)) if options.kinds == "all" else map(int, options.kinds.split(","))
    options.kinds = [KINDS[index] for index in chosen]
    if min(options.samples, options.prompts, options.requests, options.rounds) < 1:
        parser.error("--samples, --prompts, --requests and --rounds: 1 or more")
    if options.out.suffix != ".json":
        parser.error("--out: give a name that ends in .json")
    return options


def write(output: Path, part: str, found: dict[str, Any]) -> None:
    """Put a part into the result file; the table and the picture follow it."""
    result = json.loads(output.read_text()) if output.exists() else {}
    result[part] = found
    result = {name: result[name] for name in PARTS if name in result}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(result))
    if part == "answers" and found["rows"]:
        plot(found["rows"], output.with_suffix(".png"))


def main() -> None:
    options = parse()
    model = options.model or real_model()
    given = {key: str(value) for key, value in vars(options).items()}
    # Of the start: what is measured is the code of then.
    origin = provenance()

    def keep(found: dict[str, Any]) -> None:
        write(options.out, options.part, {**origin, **used(), "options": given, **found})

    mixture = options.policies, options.budgets, options.kinds
    if options.part == "answers":
        seeds = range(options.first, options.first + options.samples)
        answers.measure(model, *mixture, seeds, options.tokens, options.minutes, keep)
    elif options.part == "oracle":
        oracle.measure(model, *mixture, options.prompts, options.tokens, keep)
    else:
        load = Load(options.input, options.output, options.requests, options.at_once)
        cost.run(
            model, options.policies[-1], options.budget, options.shares, load, options.rounds,
            options.work, keep,
        )  # fmt: skip
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
