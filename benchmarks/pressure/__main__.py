"""``python -m benchmarks.pressure``: what eviction under pressure keeps, and what it costs.

    python -m benchmarks.pressure [--parts lossless,swing,needle] [--quick]

Needs an idle machine for its throughputs. `lossless` has two servers up at once and loads one of
them at a time; the other parts start one after the other.
"""

import argparse
import json
from pathlib import Path

from benchmarks.pressure import lossless, needle, swing
from benchmarks.pressure.report import markdown, plot
from benchmarks.pressure.servers import PRESSURE, Servers, add_arguments
from benchmarks.provenance import provenance
from benchmarks.quality.local_chat import LocalChat
from benchmarks.smollm2 import real_model

RESULT = Path(__file__).parents[1] / "results" / "pressure.json"
PARTS = ("lossless", "swing", "needle")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure")
    add_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--answers", type=int, default=8, help="that must be stock vLLM's")
    parser.add_argument("--rounds", type=int, default=5, help="alternating loads, memory for all")
    parser.add_argument("--requests", type=int, default=16, help="of a load, and of a burst")
    parser.add_argument("--phases", type=int, default=5, help="quiet ones and bursts by turns")
    parser.add_argument("--memory", default="2,4,8,16", help="full requests, of the needle's load")
    parser.add_argument("--samples", type=int, default=20, help="needles, asked in two scenarios")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.quick:
        options.answers, options.rounds, options.requests, options.phases = 2, 1, 8, 2
        options.memory, options.samples = "2", 3
    return options


def main() -> None:
    options = parse()
    model = options.model or real_model()
    servers = Servers(model, options.policy, options.budget, options.work)
    result = {"options": {key: str(value) for key, value in vars(options).items()}, **provenance()}
    if "lossless" in options.parts:
        chat = LocalChat(model)
        texts = [one.sample.context for one in needle.prompts(chat, options.answers)]
        result["lossless"] = lossless.run(servers, texts, options.rounds, options.requests)
    if "swing" in options.parts:
        result["swing"] = swing.run(servers, options.phases, options.requests)
    if "needle" in options.parts:
        memories = [int(memory) for memory in options.memory.split(",")]
        result["needle"] = needle.run(servers, memories, options.samples)
        plot(result, options.output.with_suffix(".png"))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(result))
    print(options.output.with_suffix(".md").read_text())
    found = result.get("lossless")
    if found and (
        found["same_answers"] != found["answers"] or found["counted"][PRESSURE]["evictions"]
    ):
        raise SystemExit("Eviction under pressure changed answers where memory was ample.")


if __name__ == "__main__":
    main()
