"""Reports of evictions since the last report: plain data for the front end.

The engine core sends a report inside vLLM's ``SchedulerStats``, in the ``dict`` for the statistics
of KV connectors, under a separate key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm_kvevict.metrics.counters import Counters, Totals

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

STATS_KEY = "vllm_kvevict"
"""Key of a report in ``SchedulerStats.kv_connector_stats``."""

MEASURED = "kv_eviction_measured"
"""Attribute of vLLM's ``ModelRunnerOutput`` that carries a worker's measurements to the engine
core."""

Audited = tuple[str, str, float, float, float]
"""Loss of an eviction: request id, policy, share of the tokens that was kept, KL divergence of the
next tokens in nats, share of equal most likely tokens."""

TOTALS = tuple(total.name for total in fields(Totals))
"""Fields of a report that are increments."""


@dataclass(kw_only=True)
class Report(Totals):
    """One engine's report.

    ``evictions`` counts prefill and decode evictions by policy; the fields of :data:`TOTALS` are
    increments since the last report. ``kept_share`` has one value per finished request, ``seconds``
    one per eviction, ``head_spread`` one per sampled eviction, and ``audits`` one per replayed
    eviction. ``blocks_saved`` (blocks), ``idle_stores``, ``store_bytes`` (bytes of host memory),
    the watermarks in free blocks, and ``pressing`` (eviction under pressure runs) are current
    values.
    """

    evictions: dict[str, list[int]] = field(default_factory=dict)
    kept_share: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    head_spread: list[float] = field(default_factory=list)
    audits: list[Audited] = field(default_factory=list)
    blocks_saved: int = 0
    idle_stores: int = 0
    store_bytes: int = 0
    mark_low: int = 0
    mark_high: int = 0
    pressing: bool = False


class Reporter:
    """Collects reports in the engine core, one per step in which something happened.

    Args:
        counters: The scheduler's totals.

    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._reported = self._totals()
        self._state = (0, False, 0, 0)
        self._next = Report()
        self._news = False

    def _totals(self) -> tuple[int, ...]:
        counters = self._counters
        return tuple(getattr(counters, name) for name in TOTALS)

    def evicted(self, policy: str, in_prefill: bool) -> None:
        """Count one eviction."""
        self._next.evictions.setdefault(policy, [0, 0])[not in_prefill] += 1
        self._news = True

    def kept(self, share: float) -> None:
        """Record the share of its tokens that a finished request kept."""
        self._next.kept_share.append(share)
        self._news = True

    def measured(
        self,
        seconds: list[float],
        head_spread: list[float],
        failed: Sequence[float] = (),
        audits: Sequence[Audited] = (),
        restores: Sequence[tuple[str, float]] = (),
        **of_scheduler: Any,
    ) -> None:
        """Record the measurements of a worker.

        ``failed`` has an entry for each failure of a policy, ``restores`` the tier and the seconds
        of each restored store. What else there is, the scheduler reads.
        """
        for tier, taken in restores:
            self._counters.restoring(taken, from_file=tier == "file")
        self._next.audits += audits
        self._counters.evictions_unscored += len(failed)
        self._next.seconds += seconds
        self._next.head_spread += head_spread
        self._news = True

    def take(
        self,
        blocks_saved: int,
        pressing: bool = False,
        marks: tuple[int, int] = (0, 0),
        stores: tuple[int, int] = (0, 0),
    ) -> Report | None:
        """Return the report since the last call; None if nothing changed. Watermarks alone do not
        cause a report.

        ``stores`` are the number of idle stores and the bytes of host memory.
        """
        totals, state = self._totals(), (blocks_saved, pressing, *stores)
        if not self._news and totals == self._reported and state == self._state:
            return None
        report, self._next = self._next, Report()
        for name, total, reported in zip(TOTALS, totals, self._reported, strict=True):
            setattr(report, name, total - reported)
        report.blocks_saved, report.pressing, report.idle_stores, report.store_bytes = state
        report.mark_low, report.mark_high = marks
        self._reported, self._state, self._news = totals, state, False
        return report


def attach(report: Report, outputs: "dict[int, EngineCoreOutputs]") -> None:
    """Add a report to vLLM's statistics, which go to one of the front ends.

    Raises:
        RuntimeError: vLLM sends no statistics, although they are enabled.

    """
    for output in outputs.values():
        if output.scheduler_stats is not None:
            stats = output.scheduler_stats
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), STATS_KEY: vars(report)}
            return
    raise RuntimeError("vLLM made no SchedulerStats for a step that evicted.")


def detach(stats: "SchedulerStats") -> Report | None:
    """Remove and return the report, so that vLLM's own loggers find only their statistics."""
    sent: dict[str, Any] | None = stats.kv_connector_stats
    if sent is None or STATS_KEY not in sent:
        return None
    # The statistics of a connector stay for vLLM's own loggers.
    stats.kv_connector_stats = {k: v for k, v in sent.items() if k != STATS_KEY} or None
    return Report(**sent[STATS_KEY])
