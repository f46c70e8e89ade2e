"""What a simulated run counts, and the times that its clients see."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 200
"""Most points of a series in a result file."""


@dataclass
class Tally:
    """Totals of one run. Seconds are simulated ones, but for ``scheduler_seconds``."""

    steps: int = 0
    seconds: float = 0.0
    sampled: int = 0
    computed: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    peak_running: int = 0
    running: int = 0
    """Sum over steps."""
    peak_saved: int = 0
    peak_used: int = 0
    """Blocks of the pool."""
    most_evictions: int = 0
    """In one step."""
    scheduler_seconds: float = 0.0
    by_phase: dict[str, list[int]] = field(default_factory=dict)
    """Requests that finished, and those of them that were never evicted, by phase of arrival."""
    first: array = field(default_factory=lambda: array("d"))
    between: array = field(default_factory=lambda: array("d"))
    series: list[tuple[float, int, float, int, int, int]] = field(default_factory=list)

    def point(self, free_share: float, running: int, waiting: int, evictions: int) -> None:
        """Note where the run stands after a step."""
        self.running += running
        self.peak_running = max(self.peak_running, running)
        self.series.append(
            (self.seconds, running, 1 - free_share, self.sampled, self.preemptions, evictions)
        )

    def end(self, phase: str, whole: bool) -> None:
        """Note a request that finished."""
        self.finished += 1
        if phase:
            ended = self.by_phase.setdefault(phase, [0, 0])
            ended[0] += 1
            ended[1] += whole

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        steps = max(1, self.steps)
        stride = -(-len(self.series) // POINTS) or 1
        names = ("seconds", "running", "used", "sampled", "preemptions", "evictions")
        columns = list(zip(*self.series[stride - 1 :: stride], strict=True))
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "sampled_tokens": self.sampled,
            "tokens_per_s": round(self.sampled / self.seconds, 1) if self.seconds else 0.0,
            "computed_tokens": self.computed,
            "finished": self.finished,
            "aborted": self.aborted,
            "by_phase": {
                phase: {"finished": finished, "never_evicted": whole}
                for phase, (finished, whole) in self.by_phase.items()
            },
            "preemptions": self.preemptions,
            "running_peak": self.peak_running,
            "running_mean": round(self.running / steps, 1),
            "blocks_saved_peak": self.peak_saved,
            "blocks_used_peak": self.peak_used,
            "evictions_in_one_step": self.most_evictions,
            "ttft_s": _quantiles(self.first),
            "itl_ms": _quantiles([1000 * gap for gap in self.between]),
            "scheduler_us_a_step": round(self.scheduler_seconds / steps * 1e6, 1),
            "series": {
                name: [round(value, 4) for value in column]
                for name, column in zip(names, columns, strict=False)
            },
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = sorted(values)
    return {
        name: round(found[min(len(found) - 1, int(len(found) * share))], 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
