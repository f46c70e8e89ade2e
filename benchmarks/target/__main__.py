"""``python -m benchmarks.target``: what prompts come to at a target, and what answers lose.

    python -m benchmarks.target [--target 0.03] [--prompts 100] [--policies probe,ada-defensive]

vLLM runs in this process, which has all logits; a server tells the most likely tokens alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.audit.prompts import KINDS
from benchmarks.provenance import provenance
from benchmarks.smollm2 import real_model
from benchmarks.target.measure import measure
from benchmarks.target.report import markdown

RESULT = Path(__file__).parents[1] / "results" / "target.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.target")
    add = parser.add_argument
    add("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    add("--target", type=float, default=0.03, help="nats")
    add("--policies", default="probe,ada-defensive")
    add("--kinds", default="all", help=f"numbers from 0 of: {'; '.join(KINDS)}")
    add("--prompts", type=int, default=100, help="of each kind")
    add("--first", type=int, default=0, help="the first prompt of each kind")
    add("--tokens", type=int, default=1300, help="of a prompt, about")
    add("--out", type=Path, default=RESULT, help="the table is written beside it")
    options = parser.parse_args(arguments)
    options.policies = options.policies.split(",")
    chosen = range(len(KINDS)) if options.kinds == "all" else map(int, options.kinds.split(","))
    options.kinds = [KINDS[index] for index in chosen]
    if options.prompts < 1 or options.target < 0:
        parser.error("--prompts: 1 or more; --target: 0 or more")
    if options.out.suffix != ".json":
        parser.error("--out: give a name that ends in .json")
    return options


def main() -> None:
    options = parse()
    given = {key: str(value) for key, value in vars(options).items()}
    origin = provenance()

    def keep(found: dict[str, Any]) -> None:
        result = {**origin, "options": given, **found}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(markdown(result))

    measure(
        options.model or real_model(), options.policies, options.kinds, options.target,
        range(options.first, options.first + options.prompts), options.tokens, keep,
    )  # fmt: skip
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
