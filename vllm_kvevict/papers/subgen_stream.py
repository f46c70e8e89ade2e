"""SubGen's Algorithm 1: samples of the evicted tokens, which attention weighs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.papers.estimator import PAGE, Estimator, finite, squared_norms
from vllm_kvevict.papers.memories import Memories
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

HELD, RECENT, FIRST = 1.0, 2.0, 3.0
"""Scores of samples and representatives, of tokens not streamed yet, of protected tokens."""


@dataclass(frozen=True)
class HeadStream:
    """One head between two evictions: its stream so far, and how many of its newest tokens in
    the store are still to come."""

    estimator: Estimator
    waiting: int


@dataclass(frozen=True)
class Summary:
    """One layer's candidates at an eviction.

    Args:
        scores: [H, num_candidates] float32, as :meth:`Scorer.scores` returns them.
        log_weights: [H, num_candidates, 2] float32, as :meth:`Scorer.kept` returns them.
        streams: Of each head; tokens are named by column.

    """

    scores: torch.Tensor
    log_weights: torch.Tensor
    streams: list[HeadStream]


@dataclass(frozen=True)
class SubGenStream(Scorer):
    """SubGen (arXiv:2402.06082), Algorithm 1, per KV head, in a cache of K tokens.

    Tokens leave for the stream oldest first, and no more of them than make what is left fit:
    ``K - p`` slots, beside p protected tokens, hold the stream's samples and representatives and
    the newest tokens, which count as themselves until their turn comes. Of the slots the share
    ``value_share`` bounds the draws by value norm (s); t samples and a representative of each
    cluster share the others, which bounds the clusters.

    Args:
        radius: delta, as far as the clusters fit; 0 starts with a cluster for every key.
        cluster_samples: t.
        value_share: ``s / (K - p)``, in (0, 1).
        seed: Repeats the draws, together with :attr:`Candidates.seed`, layer and head.

    """

    requirements: ClassVar[Requirements] = Requirements(
        window="none",
        values=True,
        floats_per_token=2,
        random=True,
        weighs=True,
        attention="vllm_kvevict.papers.weighted:WeightedAttention",
    )

    radius: float = 0.0
    cluster_samples: int = 4
    value_share: float = 0.25
    seed: int = 0
    memories: Memories = field(default_factory=Memories, init=False, repr=False, compare=False)
    """A list of :class:`HeadStream` for every layer of a request, between its evictions."""
    _summaries: dict[tuple[int, str], Summary] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def scores(self, candidates: Candidates) -> torch.Tensor:
        where = candidates.row, candidates.layer_name
        summary = self._summaries[where] = self.summarize(candidates, self.memories.of(*where))
        return summary.scores

    def kept(self, row: int, layer_name: str, columns: torch.Tensor) -> torch.Tensor:
        summary = self._summaries.pop((row, layer_name))
        self.memories.keep(row, layer_name, self.moved(summary.streams, columns))
        return summary.log_weights.gather(1, columns[..., None].expand(-1, -1, 2))

    def forget(self, rows: Sequence[int]) -> None:
        self.memories.clear(rows)

    @property
    def min_slots(self) -> int:
        """A draw by value, and one cluster."""
        return self.cluster_samples + 2

    def summarize(self, candidates: Candidates, memory: list[HeadStream] | None) -> Summary:
        """Score the candidates, and weigh the best ``keep`` of them.

        Args:
            candidates: One layer of one request. At a later eviction the first ``keep`` columns
                are those that the eviction before it kept.
            memory: What :meth:`moved` returned of the last summary; None at the first eviction.

        Raises:
            ValueError: There are no values, or no room beside the protected tokens.

        """
        if candidates.values is None:
            raise ValueError("subgen-stream needs the values of the cached tokens")
        columns = candidates.num_candidates
        valid = candidates.valid[:, :columns]
        points = finite(candidates.keys[:, :columns].float())
        norms = squared_norms(candidates.values[:, :columns])
        scores = torch.zeros(valid.shape, dtype=torch.float32)
        log_weights = torch.full((*valid.shape, 2), float("-inf"))
        streams = []
        for head in range(candidates.num_heads):
            begin = columns - int(valid[head].sum())
            first = min(begin + candidates.protected, columns)
            room = candidates.keep - (first - begin)
            if memory is None:
                where = (*candidates.seed, candidates.layer, candidates.first_head + head)
                stream, at = self._start(room, (self.seed, *where)), first
            else:
                assert begin == 0, "a head that keeps as much as any other has no padding"
                stream = memory[head].estimator
                at = candidates.keep - memory[head].waiting
            # It stops between pages of the stream only, so that pieces end as the whole does.
            while at < columns and (
                stream.length % PAGE or len(stream.columns) + columns - at > room
            ):
                count = min(PAGE - stream.length % PAGE, columns - at)
                stream.add(points[head], norms[head], at, count, self._most(room))
                at += count
            mine = stream.log_weights(norms[head])
            scores[head, stream.columns] = HELD
            scores[head, at:], mine[at:] = RECENT, 0.0
            scores[head, begin:first], mine[begin:first] = FIRST, 0.0
            log_weights[head] = mine
            streams.append(HeadStream(stream, columns - at))
        return Summary(scores.masked_fill(~valid, float("-inf")), log_weights, streams)

    def moved(self, memory: list[HeadStream], columns: torch.Tensor) -> list[HeadStream]:
        """A summary's streams, with tokens named by their slots in the store.

        Args:
            memory: :attr:`Summary.streams`.
            columns: [H, keep] int64 ascending: the column that went to each slot.

        """
        return [
            HeadStream(stream.estimator.moved(kept), stream.waiting)
            for stream, kept in zip(memory, columns, strict=True)
        ]

    def _start(self, room: int, seed: tuple[int, ...]) -> Estimator:
        if room < self.min_slots:
            raise ValueError(
                f"subgen-stream needs {self.min_slots} slots beside protected tokens, not {room}"
            )
        return Estimator.empty(self.radius, self.cluster_samples, self._by_value(room), seed)

    def _by_value(self, room: int) -> int:
        """s."""
        return max(1, min(int(self.value_share * room), room - self.cluster_samples - 1))

    def _most(self, room: int) -> int:
        """Clusters that always fit."""
        return (room - self._by_value(room)) // (self.cluster_samples + 1)


def build(config: "EvictionConfig") -> Scorer:
    """Scorer of the policy ``subgen-stream``."""
    mine = config.options
    return SubGenStream(mine.radius, mine.cluster_samples, mine.value_share, mine.seed)
