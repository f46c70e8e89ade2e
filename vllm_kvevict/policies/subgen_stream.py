"""SubGen Algorithm 1: weighted samples represent the evicted tokens in attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.ops.torch.estimator import PAGE, Estimator, finite, squared_norms
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer
from vllm_kvevict.policies.state import PolicyState

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

HELD, RECENT, FIRST = 1.0, 2.0, 3.0
"""Scores of samples and representatives, of tokens not yet streamed, and of protected tokens."""


@dataclass(frozen=True)
class HeadStream:
    """State of one head between two evictions.

    ``waiting`` is the number of its newest tokens in the store that are not yet streamed.
    """

    estimator: Estimator
    waiting: int


@dataclass(frozen=True)
class Summary:
    """Results for the candidates of one layer at an eviction.

    Args:
        scores: [H, num_candidates] float32, as :meth:`Scorer.scores` returns them.
        log_weights: [H, num_candidates, 2] float32, as :meth:`Scorer.kept` returns them.
        streams: State of each head; tokens are identified by column.

    """

    scores: torch.Tensor
    log_weights: torch.Tensor
    streams: list[HeadStream]


@dataclass(frozen=True)
class SubGenStream(Scorer):
    """SubGen (arXiv:2402.06082), Algorithm 1, per KV head, in a cache of K tokens.

    Tokens are streamed oldest first, and only as many as necessary for the others to fit: the
    ``K - p`` slots after p protected tokens hold the samples and representatives of the stream and
    the newest tokens, which have weight 1 until they are streamed. The share ``value_share`` of
    these slots bounds the draws by value norm (s). The other slots hold t samples and a
    representative of each cluster, which bounds the number of clusters.

    Args:
        radius: delta at the start; it grows if there are too many clusters. 0 starts with a cluster
            for every key.
        cluster_samples: t.
        value_share: ``s / (K - p)``, in (0, 1).
        seed: Seed of the draws, together with :attr:`Candidates.seed`, layer and head.

    """

    requirements: ClassVar[Requirements] = Requirements(
        window="none",
        values=True,
        floats_per_token=2,
        random=True,
        keeps_state=True,
        weighs=True,
        attention="vllm_kvevict.attention.extensions.weighted:WeightedAttention",
    )

    radius: float = 0.0
    cluster_samples: int = 4
    value_share: float = 0.25
    seed: int = 0
    state: PolicyState = field(default_factory=PolicyState, init=False, repr=False, compare=False)
    """List of :class:`HeadStream` for every layer of a request, between its evictions."""
    _summaries: dict[tuple[int, str], Summary] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def scores(self, candidates: Candidates) -> torch.Tensor:
        where = candidates.row, candidates.layer_name
        summary = self._summaries[where] = self.summarize(candidates, self.state.get(*where))
        return summary.scores.to(candidates.valid.device)

    def kept(self, row: int, layer_name: str, columns: torch.Tensor) -> torch.Tensor:
        device = columns.device
        summary = self._summaries.pop((row, layer_name))
        columns = columns.cpu()
        self.state.keep(row, layer_name, self.moved(summary.streams, columns))
        kept = summary.log_weights.gather(1, columns[..., None].expand(-1, -1, 2))
        return kept.to(device)

    def clear_rows(self, rows: Sequence[int]) -> None:
        self.state.clear(rows)

    @property
    def min_slots(self) -> int:
        """Slots of one draw by value norm and one cluster."""
        return self.cluster_samples + 2

    def summarize(self, candidates: Candidates, memory: list[HeadStream] | None) -> Summary:
        """Score the candidates, and compute log-weights of the best ``keep`` of them.

        Args:
            candidates: One layer of one request. At a later eviction, the first ``keep`` columns
                are those that the previous eviction kept.
            memory: Result of :meth:`moved` for the previous summary; None at the first eviction.

        Raises:
            ValueError: The candidates have no values, or protected tokens leave too few slots.

        """
        if candidates.values is None:
            raise ValueError("subgen-stream needs the values of the cached tokens")
        columns = candidates.num_candidates
        # A stream takes small steps that depend on one another, so it runs on the host.
        valid = candidates.valid[:, :columns].cpu()
        points = finite(candidates.keys[:, :columns].float().cpu())
        norms = squared_norms(candidates.values[:, :columns].cpu())
        scores = torch.zeros(valid.shape, dtype=torch.float32)
        log_weights = torch.full((*valid.shape, 2), float("-inf"))
        streams = []
        for head in range(candidates.num_heads):
            begin = columns - int(valid[head].sum())
            first = min(begin + candidates.protected, columns)
            room = candidates.keep - (first - begin)
            if memory is None:
                seed = (self.seed, *candidates.seed, candidates.layer, candidates.first_head + head)
                stream, at = self._start(room, seed), first
            else:
                assert begin == 0, "a head that keeps as much as any other has no padding"
                stream = memory[head].estimator
                at = candidates.keep - memory[head].waiting
            # Streaming stops only between pages of the stream, so the result does not depend on
            # the pieces in which tokens are added.
            while at < columns and (
                stream.length % PAGE or len(stream.columns) + columns - at > room
            ):
                count = min(PAGE - stream.length % PAGE, columns - at)
                stream.add(points[head], norms[head], at, count, self._max_clusters(room))
                at += count
            weights = stream.log_weights(norms[head])
            scores[head, stream.columns] = HELD
            scores[head, at:], weights[at:] = RECENT, 0.0
            scores[head, begin:first], weights[begin:first] = FIRST, 0.0
            log_weights[head] = weights
            streams.append(HeadStream(stream, columns - at))
        return Summary(scores.masked_fill(~valid, float("-inf")), log_weights, streams)

    def moved(self, memory: list[HeadStream], columns: torch.Tensor) -> list[HeadStream]:
        """Return a summary's streams, with tokens identified by their slots in the store.

        Args:
            memory: :attr:`Summary.streams`.
            columns: [H, keep] int64, ascending: the column that moved to each slot.

        """
        return [
            HeadStream(stream.estimator.moved(kept), stream.waiting)
            for stream, kept in zip(memory, columns, strict=True)
        ]

    def _start(self, room: int, seed: tuple[int, ...]) -> Estimator:
        if room < self.min_slots:
            raise ValueError(
                f"subgen-stream needs {self.min_slots} slots in addition to protected tokens, "
                f"not {room}"
            )
        return Estimator.empty(self.radius, self.cluster_samples, self._by_value(room), seed)

    def _by_value(self, room: int) -> int:
        """Return s, the number of draws by value norm."""
        return max(1, min(int(self.value_share * room), room - self.cluster_samples - 1))

    def _max_clusters(self, room: int) -> int:
        """Return the number of clusters that always fit."""
        return (room - self._by_value(room)) // (self.cluster_samples + 1)


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policy ``subgen-stream``."""
    options = config.options
    return SubGenStream(options.radius, options.cluster_samples, options.value_share, options.seed)
