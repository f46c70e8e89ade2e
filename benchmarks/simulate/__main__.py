"""``python -m benchmarks.simulate``: stock and eviction side by side (docs/dev/simulator.md)."""

import json
import os
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    # vLLM reads these when it is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.simulate.drive import Simulation
from benchmarks.simulate.options import Options
from benchmarks.simulate.plots import plot
from benchmarks.simulate.report import markdown
from benchmarks.simulate.server import Server
from benchmarks.simulate.setting import Setting


def simulate(options: Options, setting: Setting) -> dict[str, Any]:
    """Run one setting."""
    server = Server.start(options.machine, setting)
    simulation = Simulation(
        server,
        options.machine.card,
        options.load.jobs(),
        options.clients,
        options.machine.block_size,
        options.machine.asynchronous,
    )
    with tqdm(total=options.steps, desc=setting.name, unit="step", mininterval=1) as bar:
        tally = simulation.run(options.steps, bar.update)
    counters = getattr(server.scheduler, "eviction_counters", None)
    return {
        "blocks": server.blocks,
        "ring_slots": server.ring_slots,
        **tally.as_dict(),
        "counters": counters.as_dict() if counters is not None else {},
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = Options.parse(argv)
    results = {setting.name: simulate(options, setting) for setting in options.settings}
    origin = provenance()
    table = markdown(options, results, origin)
    path = options.output
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": origin, **options.as_dict(), "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)
    title = f"{options.machine.model}, {options.machine.max_num_seqs} sequences"
    plot(results, title, path.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
