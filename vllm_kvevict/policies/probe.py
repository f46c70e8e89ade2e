"""Probe: scores learned once per model from its keys, joined with the window if there is one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE, window_peaks
from vllm_kvevict.policies.base import PROTECTED, Candidates, Requirements, Scorer

LEAST = 1e-6
"""Smallest argument of a logarithm of a share of values or of attention."""


@dataclass(frozen=True)
class Probe(Scorer):
    """The logarithm of the most attention that later queries will give a token, as learned.

    Ridge regression found for every KV head how this follows from a key whose rotation is taken
    out, ``a . k + b * |k| + c``, and how from the key and ``defensive``'s score of the window. A
    small network may add to both what is not linear. The worker applies both to a token's key when
    the token first is a candidate, and keeps the two numbers outside the cache
    (:attr:`Candidates.key_scores`); nobody reads the key for it again.

    Args:
        kernel: As ``defensive`` averages the window's weights.
        before: As ``defensive``.
        after: As ``defensive``.

    """

    requirements: ClassVar[Requirements] = Requirements(
        window="optional", keys=False, key_scores=True, floats_per_token=2, heads_alone=True
    )

    kernel: int = 5
    before: int = BEFORE
    after: int = AFTER

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: The candidates carry no scores of their keys.

        """
        if candidates.key_scores is None:
            raise ValueError("probe needs the scores of the keys")
        columns = candidates.num_candidates
        if candidates.queries is None or self.requirements.window == "none":
            scores = candidates.key_scores[..., 0]
        else:
            assert candidates.window_weights is not None
            peaks = window_peaks(candidates, self.kernel, self.before, self.after)[:, :columns]
            attended = peaks.clamp_(min=LEAST).log_()
            weights = candidates.window_weights[:, None]
            scores = torch.addcmul(candidates.key_scores[..., 1], attended, weights)
        # A key that is no number must not look like padding.
        return scores.clamp(min=-PROTECTED).masked_fill(
            ~candidates.valid[:, :columns], float("-inf")
        )


@dataclass(frozen=True)
class KeyProbe(Probe):
    """The same from keys alone, on a server that records no windows for it."""

    requirements: ClassVar[Requirements] = Requirements(
        window="none", keys=False, key_scores=True, floats_per_token=1, heads_alone=True
    )


def build(config: EvictionConfig) -> Scorer:
    """Scorer of the policies ``probe`` and ``ada-probe``."""
    return Probe() if config.options.probe_window == "auto" else KeyProbe()
