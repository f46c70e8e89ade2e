"""``python -m benchmarks.pressure``: what eviction under pressure keeps, and what it costs.

    python -m benchmarks.pressure [--parts lossless,swing,needle] [--quick]

Needs an idle machine for its throughputs. `lossless` has two servers up at once and loads one of
them at a time; the other parts start one after the other.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pressure import lossless, needle, swing
from benchmarks.pressure.report import markdown, plot
from benchmarks.pressure.servers import PRESSURE, SEQUENCES, WAYS, Servers, add_arguments
from benchmarks.provenance import provenance, used
from benchmarks.quality.local_chat import LocalChat
from benchmarks.smollm2 import real_model

RESULT = Path(__file__).parents[1] / "results" / "pressure.json"
PARTS = "lossless,swing,needle"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure")
    add_arguments(parser)
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--answers", type=int, default=8, help="that must be stock vLLM's")
    parser.add_argument("--rounds", type=int, default=5, help="alternating loads, memory for all")
    parser.add_argument("--requests", type=int, default=16, help="of a load, and of a burst")
    parser.add_argument("--phases", type=int, default=3, help="quiet ones and bursts by turns")
    parser.add_argument("--memory", default="2,4,8,16", help="full requests, of the needle's load")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the needle's load")
    parser.add_argument("--samples", type=int, default=20, help="needles, asked in two scenarios")
    parser.add_argument("--clients", type=int, default=12, help="needles asked at once")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.quick:
        options.answers, options.rounds, options.requests, options.phases = 2, 1, 8, 2
        options.memory, options.samples = "2", 3
    return options


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    output = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(result))
    if "needle" in result:
        plot(result, output.with_suffix(".png"))


def main() -> None:
    options = parse()
    model = options.model or real_model()
    servers = Servers(
        model, options.policy, options.budget, options.work, options.layers,
        max(SEQUENCES, options.clients), options.prefill_interval,
    )  # fmt: skip
    chat, memories = LocalChat(model), [int(memory) for memory in options.memory.split(",")]
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "lossless": lambda: lossless.run(
            servers,
            [one.sample.context for one in needle.prompts(chat, options.answers)],
            options.rounds,
            options.requests,
        ),
        "swing": lambda: swing.run(servers, options.phases, options.requests),
        "needle": lambda: needle.run(
            servers, memories, options.samples, options.clients, options.ways.split(",")
        ),
    }
    given = {key: str(value) for key, value in vars(options).items()}
    result: dict[str, Any] = {"options": given, **provenance()}
    for part in options.parts.split(","):
        result[part] = run[part]()
        # What was measured is kept, whatever becomes of the next part.
        result |= used()
        write(options, result)
    print(options.output.with_suffix(".md").read_text())
    if found := result.get("lossless"):
        evictions = found["counted"][PRESSURE]["evictions"]
        if found["same_answers"] != found["answers"] or evictions:
            raise SystemExit("Eviction under pressure changed answers where memory was ample.")


if __name__ == "__main__":
    main()
