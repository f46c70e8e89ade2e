"""What a budget would lose of a request's answer, by what its trial said."""

import math
from collections.abc import Mapping

from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import LEARNED
from vllm_kvevict.settings.profile import Profile

OWN = 0.3
"""Exponent of how far a trial is from what a trial of its budget usually says, under a profile.

Among requests of one kind an audit's rank correlation with the answer's loss is 0.1 to 0.2: most
of what it says of its own request is noise. With 1 in its place requests of the same loss kept 1.8
times as much as one budget for all of them would (benchmarks/results/audit_probe_prose.json)."""

SEEN = 0.5
"""The same without a profile, where what is usual is the mean of the trials that the server has
seen (benchmarks/results/audit.json)."""

FEW = 4
"""Trials after which that mean counts for half of what it will."""

MANY = 256
"""Trials from which on older ones fade from the mean, because traffic changes."""

MOST_MEANS = 4096
"""Means that are kept: a client may name a cache salt of its own, of any length, in each request;
salts themselves are not kept."""

BEYOND = 1.5
"""Times its audit that an answer loses on average under a policy that scores by the window: the
audit reads the very window by which was chosen (ada-defensive:
benchmarks/results/target_ada_defensive.md)."""

LEAST = 1e-6
"""Nats below which an audit is rounding."""


class Estimate:
    """Reads trials as losses of answers.

    Args:
        config: The server's; its profile says what trials and answers lose on average, by budget.

    """

    def __init__(self, config: EvictionConfig) -> None:
        profile = config.profile
        audits = profile.audits if isinstance(profile, Profile) else {}
        # A server that records no windows scores by keys alone.
        kind = "joined" if config.options.probe_window == "auto" else "keys"
        self._usual: Mapping[str, tuple[float, float]] = audits.get(kind, {})
        self._seen: dict[tuple[int, str, str], tuple[int, float]] = {}
        """Trials of a cache salt's hash, policy and budget, and the mean of their logarithms:
        tenants that share no prefixes do not move each other's budgets."""

    def forget(self) -> None:
        """Know no trials: the model's weights may change."""
        self._seen.clear()

    def loss(self, policy: str, share: str, nats: float, salt: str | None = None) -> float:
        """Nats that the answer is expected to lose; to be asked once for each trial.

        Args:
            policy: The request's.
            share: Budget of the trial, as in ``RUNGS``.
            nats: KL divergence that the trial's audit found; below 0 by rounding, and no number
                where logits are none.
            salt: The request's cache salt.

        """
        if not math.isfinite(nats):
            return math.inf
        nats = max(nats, LEAST)
        if policy in LEARNED and share in self._usual:
            audit, answer = self._usual[share]
            return answer * (nats / audit) ** OWN
        beyond = 1.0 if policy in LEARNED else BEYOND
        return beyond * self._among((hash(salt), policy, share), nats)

    def _among(self, of: tuple[int, str, str], nats: float) -> float:
        """What a trial says, nearer to those before it as they grow in number."""
        log = math.log(nats)
        before, mean = self._seen.pop(of, (0, 0.0))
        count = min(before + 1, MANY)
        mean += (log - mean) / count
        self._seen[of] = count, mean
        if len(self._seen) > MOST_MEANS:
            del self._seen[next(iter(self._seen))]
        own = SEEN + (1 - SEEN) * FEW / (FEW + before)
        return math.exp(mean + own * (log - mean))
