"""The histograms of audits."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from vllm_kvevict.metrics.report import Audited

NATS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10)
AGREEMENT = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1)
KEPT = (0.0625, 0.125, 0.25, 0.5, 1)
"""Kept shares that are used as labels."""

MAX_REQUEST_ID_CHARS = 100
"""Maximum number of characters of a request id in an exemplar, which may have 128 in total."""


def kept_label(share: float) -> str:
    """Return the nearest of :data:`KEPT` by ratio, such as ``12.5%``. Whole pages and the tail add
    to a budget."""
    nearest = min(KEPT, key=lambda label: abs(math.log(max(share, 1e-6) / label)))
    return f"{100 * nearest:g}%"


class AuditMetrics:
    """Results of audits, by policy and by the share of the tokens that was kept.

    Args:
        make: Function that creates a metric from its kind, name, text and labels.
        labels: vLLM's own label values of each engine.

    """

    def __init__(self, make: Callable[..., Any], labels: Mapping[int, Sequence[str]]) -> None:
        self._labels = labels
        more = "policy", "kept"
        self._nats = make(
            "histogram",
            "audit_kl_nats",
            "KL divergence of the next tokens after an eviction from those before it, by the "
            "rounded share of the tokens that was kept.",
            *more,
            buckets=NATS,
        )
        self._agreement = make(
            "histogram",
            "audit_agreement",
            "Share of the replayed tokens with the same most likely next token.",
            *more,
            buckets=AGREEMENT,
        )

    def record(self, audits: Sequence[Audited], engine: int) -> None:
        """Add the audits that an engine reports."""
        for request_id, policy, kept, nats, agreed in audits:
            labels = *self._labels[engine], policy, kept_label(kept)
            exemplar = {"request_id": request_id[:MAX_REQUEST_ID_CHARS]}
            for metric, value in ((self._nats, nats), (self._agreement, agreed)):
                child = metric.labels(*labels)
                if isinstance(child, MetricWrapperBase):
                    child.observe(value, exemplar)
                else:
                    # Metrics of Ray have no exemplars.
                    child.observe(value)
