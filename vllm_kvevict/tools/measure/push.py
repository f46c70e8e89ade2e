"""Gives the measured loss to Prometheus, by a Pushgateway or as a file for a collector."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvevict.tools.measure.loss import Loss

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "vllm_kvevict:measured_"
JOB = "vllm_kvevict_measure"
LABELS = ("model_name", "budget", "requests")

GAUGES = {
    "loss_nats": ("mean", "Nats that recorded answers lose per token, on average."),
    "loss_low_nats": ("low", "Lower end of the 95% interval of the loss."),
    "loss_high_nats": ("high", "Upper end of the 95% interval of the loss."),
    "requests": ("requests", "Recorded requests that were scored."),
}
"""Attribute of a loss and meaning, by the metric's name after the prefix."""

WHEN = "timestamp_seconds"


def registry(
    model: str, losses: Sequence[tuple[str, Sequence[Loss]]], now: float
) -> "CollectorRegistry":
    """Return a registry of prometheus_client with the losses of a run.

    Args:
        model: Name of the model.
        losses: Losses by budget.
        now: Seconds since the epoch.

    """
    from prometheus_client import CollectorRegistry, Gauge

    made = CollectorRegistry()
    for name, (attribute, text) in GAUGES.items():
        gauge = Gauge(PREFIX + name, text, LABELS, registry=made)
        for budget, groups in losses:
            for one in groups:
                gauge.labels(model, budget, one.group).set(getattr(one, attribute))
    when = Gauge(PREFIX + WHEN, "When the loss was measured.", LABELS[:1], registry=made)
    when.labels(model).set(now)
    return made


def give(
    model: str,
    losses: Sequence[tuple[str, Sequence[Loss]]],
    gateway: str | None,
    textfile: Path | None,
) -> None:
    """Push the losses, or write them.

    Args:
        model: Name of the model.
        losses: Losses by budget.
        gateway: Address of a Pushgateway, or None.
        textfile: File that ends in ``.prom``, or None.

    Raises:
        OSError: The gateway does not answer, or the file cannot be written.

    """
    from prometheus_client import push_to_gateway, write_to_textfile

    made = registry(model, losses, time.time())
    if gateway is not None:
        push_to_gateway(gateway, JOB, made, grouping_key={"model": model}, timeout=30)
    if textfile is not None:
        write_to_textfile(str(textfile), made)
