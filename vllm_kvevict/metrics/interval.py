"""Evictions of one engine between two lines of vLLM's periodic statistics."""

from dataclasses import dataclass, field

from vllm_kvevict.metrics.report import Report


@dataclass
class Interval:
    """Sums of the reports of one engine since the last line; ``saved`` is the current value."""

    saved: int = 0
    evictions: list[int] = field(default_factory=lambda: [0, 0])
    postponed: int = 0
    tokens: int = 0
    blocks: int = 0
    timed: int = 0
    seconds: float = 0.0
    audits: list[tuple[float, str]] = field(default_factory=list)
    """KL divergence in nats and request id of every replayed eviction."""

    def add(self, report: Report) -> None:
        for counts in report.evictions.values():
            self.evictions = [a + b for a, b in zip(self.evictions, counts, strict=True)]
        self.postponed += report.postponed
        self.tokens += report.tokens_evicted
        self.blocks += report.blocks_freed - report.store_blocks_allocated
        self.timed += len(report.seconds)
        self.seconds += sum(report.seconds)
        self.audits += [(nats, request_id) for request_id, _, _, nats, _ in report.audits]
        self.saved = report.blocks_saved

    def __bool__(self) -> bool:
        return bool(any(self.evictions) or self.postponed or self.audits)

    def line(self) -> str:
        """Return the log line."""
        prefill, decode = self.evictions
        text = (
            f"KV eviction: {prefill} evictions in prefill, {decode} in decode, "
            f"{self.postponed} postponed, {self.tokens} tokens evicted, "
            f"{self.blocks} blocks given back, {self.saved} blocks saved now"
        )
        if self.timed:
            text += f", {1000 * self.seconds / self.timed:.1f} ms an eviction"
        if self.audits:
            mean = sum(nats for nats, _ in self.audits) / len(self.audits)
            worst, request_id = max(self.audits)
            text += f", {len(self.audits)} audited: KL {mean:.3f} nats, at most {worst:.3f} in "
            text += request_id
        return text
