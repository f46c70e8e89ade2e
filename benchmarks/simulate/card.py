"""How long a step takes: bytes and FLOPs over the peaks of a card, in seconds."""

from dataclasses import dataclass

from benchmarks.simulate.model import Sizes


@dataclass(frozen=True)
class Card:
    """Peaks of one card as its vendor gives them, and how much of them is reached (assumed).

    Args:
        memory: Bytes.
        bandwidth: Of its memory, bytes a second.
        flops: Dense bfloat16, a second.
        link: To the other cards, bytes a second and direction.
        reached_flops: Share of ``flops`` that matrix products reach.
        reached_bandwidth: Share of ``bandwidth`` and ``link`` that is reached.
        link_latency: Seconds of one all-reduce beside its bytes.
        overhead: Seconds of a step beside the model: launch, sampling, input tensors.

    """

    memory: int
    bandwidth: float
    flops: float
    link: float
    reached_flops: float = 0.6
    reached_bandwidth: float = 0.8
    link_latency: float = 10e-6
    overhead: float = 500e-6

    def assumptions(self) -> str:
        """For the head of a report."""
        return (
            f"{self.memory / 1e9:.0f} GB, {self.reached_bandwidth:.0%} of "
            f"{self.bandwidth / 1e12:.2f} TB/s, {self.reached_flops:.0%} of "
            f"{self.flops / 1e12:.0f} TFLOP/s, link {self.link / 1e9:.0f} GB/s, "
            f"all-reduce {self.link_latency * 1e6:.0f} us, {self.overhead * 1e6:.0f} us a step "
            "beside the model; the scheduler's own time is hidden"
        )


CARDS = {
    "a100": Card(80 * 10**9, 2.04e12, 312e12, 300e9),
    "h100": Card(80 * 10**9, 3.35e12, 989e12, 450e9),
    "h200": Card(141 * 10**9, 4.8e12, 989e12, 450e9),
    "b200": Card(180 * 10**9, 8.0e12, 2250e12, 900e9),
}


@dataclass
class Work:
    """What one step does on a rank.

    Args:
        tokens: Computed in it.
        cached: Cached tokens that attention reads, each once a request.
        pairs: (query, key) pairs of attention, before heads.
        evicted: Cached tokens that evictions read.
        kept: Cached tokens that evictions copy.

    """

    tokens: int = 0
    cached: int = 0
    pairs: int = 0
    evicted: int = 0
    kept: int = 0


def step_seconds(card: Card, sizes: Sizes, work: Work) -> float:
    """Seconds of a step: each part takes what is longer, its bytes or its FLOPs.

    An eviction reads the keys it scores, and reads and writes what it keeps.
    """
    bandwidth = card.bandwidth * card.reached_bandwidth
    flops = card.flops * card.reached_flops
    parameters = sizes.weights / sizes.itemsize
    linear = max(2 * parameters * work.tokens / flops, sizes.weights / bandwidth)
    attention = max(
        4 * sizes.query_width * sizes.layers * work.pairs / flops,
        (work.cached + work.tokens) * sizes.kv_token / bandwidth,
    )
    eviction = (work.evicted / 2 + 2 * work.kept) * sizes.kv_token / bandwidth
    return linear + attention + eviction + _reduce(card, sizes, work.tokens) + card.overhead


def _reduce(card: Card, sizes: Sizes, tokens: int) -> float:
    """Two ring all-reduces a layer."""
    if sizes.ranks == 1:
        return 0.0
    moved = 2 * (sizes.ranks - 1) / sizes.ranks * tokens * sizes.hidden * sizes.itemsize
    return 2 * sizes.layers * (card.link_latency + moved / (card.link * card.reached_bandwidth))
