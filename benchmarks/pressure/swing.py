"""Too little memory, and a load that swings: who is preempted, who is evicted, and when."""

from typing import Any

from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.pressure.servers import PRESSURE, WAYS, Servers, counts, since

PROMPT, OUTPUT = 384, 384
MEMORY, CLIENTS = 4, 12
"""Full requests that fit without eviction, and requests at once in a burst."""

QUIET, BURST = "quiet", "burst"


def loads(phases: int, requests: int) -> list[tuple[str, Load]]:
    """Quiet phases with bursts between them."""
    found = []
    for number in range(phases):
        quiet = number % 2 == 0
        count, clients = (requests // 4, 2) if quiet else (requests, CLIENTS)
        load = Load(PROMPT, OUTPUT, count, clients, seed=number)
        found.append((QUIET if quiet else BURST, load))
    return found


def run(servers: Servers, phases: int, requests: int) -> dict[str, Any]:
    """All phases under pressure, the bursts under every way.

    Args:
        servers: The servers.
        phases: Quiet ones and bursts, by turns; the first is quiet.
        requests: Of a burst; a quiet phase has a quarter.

    """
    rows = []
    every = loads(phases, requests)
    bursts = [(name, load) for name, load in every if name == BURST]
    with tqdm(total=len(every) + 2 * len(bursts), desc="too little memory") as bar:
        for way in WAYS:
            with servers.start(way, MEMORY, PROMPT + OUTPUT) as server:
                server.warm_up()
                for name, load in every if way == PRESSURE else bursts:
                    before = counts(server)
                    measured = measure(server, servers.model, load)
                    row = {"way": way, "phase": name, **measured, **since(server, before)}
                    row["sampled_a_step"] = row["sampled"] / row["steps"]
                    rows.append(row)
                    bar.update()
    return {
        "load": f"bursts of {requests} requests of {PROMPT} + {OUTPUT} tokens, {CLIENTS} at once, "
        f"quiet phases of {requests // 4}, 2 at once; memory for {MEMORY} of them",
        "rows": rows,
    }
