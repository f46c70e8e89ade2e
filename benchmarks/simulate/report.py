"""The table of a run: one line a setting, ratios to the first."""

from typing import Any

from benchmarks.provenance import sentence
from benchmarks.simulate.load import Conversations, Load, Trace
from benchmarks.simulate.options import Options

COLUMNS = (
    "setting",
    "blocks",
    "steps",
    "sampled",
    "x",
    "tokens/s",
    "x",
    "computed",
    "finished",
    "peak",
    "mean",
    "preempted",
    "evictions prefill+decode",
    "postponed",
    "most a step",
    "blocks saved",
    "TTFT p50/p99 s",
    "ITL p50/p99 ms",
    "us a step",
)


def markdown(options: Options, results: dict[str, Any], origin: dict[str, Any]) -> str:
    """The table, with the run's provenance and the assumptions of the clock above it."""
    machine = options.machine
    rows = [_row(name, one, next(iter(results.values()))) for name, one in results.items()]
    lines = [
        sentence(origin),
        "",
        f"{machine.model} on {machine.ranks} card(s): {machine.card.assumptions()}.",
        f"{'Async' if machine.asynchronous else 'Sync'} scheduler, at most "
        f"{machine.max_num_seqs} sequences and {machine.max_batched} tokens a step, blocks of "
        f"{machine.block_size}; {options.load}"
        + ("" if _arrives(options.load) else f", {options.clients} clients")
        + ".",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(row) + " |" for row in rows),
        *_phases(results),
    ]
    return "\n".join(lines) + "\n"


def _arrives(load: Load | Conversations | Trace) -> bool:
    """True if requests arrive at times of their own, False in a closed loop."""
    return isinstance(load, Trace) or (isinstance(load, Load) and load.rate is not None)


def _row(name: str, one: dict[str, Any], first: dict[str, Any]) -> list[str]:
    counters = one["counters"]

    def ratio(key: str) -> str:
        return f"{one[key] / first[key]:.2f}" if first[key] else "-"

    def quantiles(key: str) -> str:
        return "/".join(f"{one[key][share]:.4g}" for share in ("p50", "p99")) if one[key] else "-"

    evictions = "{evictions_prefill}+{evictions_decode}".format(**counters) if counters else "-"
    return [
        name,
        str(one["blocks"]),
        str(one["steps"]),
        str(one["sampled_tokens"]),
        ratio("sampled_tokens"),
        f"{one['tokens_per_s']:.0f}",
        ratio("tokens_per_s"),
        str(one["computed_tokens"]),
        str(one["finished"]),
        str(one["running_peak"]),
        str(one["running_mean"]),
        str(one["preemptions"]),
        evictions,
        _postponed(counters),
        str(one["evictions_in_one_step"]),
        str(one["blocks_saved_peak"]),
        quantiles("ttft_s"),
        quantiles("itl_ms"),
        f"{one['scheduler_us_a_step']:.0f}",
    ]


def _phases(results: dict[str, Any]) -> list[str]:
    """A table of its own for a load with phases: who was never evicted."""
    found = [
        f"| {name} | {phase} | {ended['finished']} | {ended['never_evicted']} |"
        for name, one in results.items()
        for phase, ended in one["by_phase"].items()
    ]
    head = ["", "| setting | phase | finished | never evicted |", "| --- | --- | --- | --- |"]
    return [*head, *found] if found else []


def _postponed(counters: dict[str, Any]) -> str:
    """The total, or by cause."""
    causes = {key: value for key, value in counters.items() if key.startswith("postponed")}
    return (
        " ".join(
            f"{value} {key.removeprefix('postponed').removeprefix('_')}".strip()
            for key, value in causes.items()
        )
        or "-"
    )
