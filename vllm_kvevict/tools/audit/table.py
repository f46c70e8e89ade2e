"""Reads the audits of a running server from its metrics."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

KL = "vllm_kvevict:audit_kl_nats"
AGREEMENT = "vllm_kvevict:audit_agreement"
DROPPED = "vllm_kvevict:dropped_audits_total"
EVICTIONS = "vllm_kvevict:evictions_total"


@dataclass
class Audits:
    """Audits of one policy at one share of the tokens, over all engines of a server.

    Args:
        policy: What chose the tokens.
        kept: Share that was left, rounded, such as ``25%``.

    """

    policy: str
    kept: str
    count: float = 0
    nats: float = 0
    """Sum of the KL divergences."""
    agreement: float = 0
    """Sum of the shares of equal first choices."""
    below: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    """Audits up to each upper end of the histogram, in nats."""

    def quantile(self, share: float) -> float:
        """Nats that so many audits do not exceed: the upper end of a bucket, ``inf`` for above."""
        ends = (end for end, count in sorted(self.below.items()) if count >= share * self.count)
        return next(ends, float("inf"))


@dataclass
class Summary:
    """All audits of a server, and what they are out of."""

    audits: list[Audits]
    evictions: float
    dropped: float


def read(text: str) -> Summary:
    """Read what a server answers to ``/metrics``."""
    found: dict[tuple[str, str], Audits] = {}
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith((KL, AGREEMENT)):
                key = sample.labels["policy"], sample.labels["kept"]
                _add(found.setdefault(key, Audits(*key)), sample.name, sample.labels, sample.value)
            totals[sample.name] += sample.value
    audits = sorted(found.values(), key=lambda one: (one.policy, float(one.kept.rstrip("%"))))
    return Summary([one for one in audits if one.count], totals[EVICTIONS], totals[DROPPED])


def _add(audits: Audits, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == f"{KL}_count":
        audits.count += value
    elif name == f"{KL}_sum":
        audits.nats += value
    elif name == f"{KL}_bucket":
        audits.below[float(labels["le"])] += value
    elif name == f"{AGREEMENT}_sum":
        audits.agreement += value


def lines(summary: Summary) -> Iterable[str]:
    """A table, a row for each policy and share; then how many evictions it stands for."""
    head = "policy", "kept, about", "audits", "mean KL", "median", "90%", "same first choice"
    yield "  ".join(f"{name:>{_width(name)}}" for name in head)
    for one in summary.audits:
        cells = (
            one.policy,
            one.kept,
            f"{one.count:.0f}",
            f"{one.nats / one.count:.3f}",
            *(f"<={one.quantile(share):g}" for share in (0.5, 0.9)),
            f"{one.agreement / one.count:.0%}",
        )
        yield "  ".join(f"{cell:>{_width(name)}}" for cell, name in zip(cells, head, strict=True))
    audited = sum(one.count for one in summary.audits)
    yield (
        f"{audited:.0f} of {summary.evictions:.0f} evictions were audited, {summary.dropped:.0f} "
        "more were drawn and gave way. KL in nats, of the next token."
    )


def _width(name: str) -> int:
    return max(len(name), 20 if name == "policy" else 7)
