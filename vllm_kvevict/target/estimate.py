"""What a budget would lose of a request's answer, by what its trial said."""

from collections.abc import Mapping

from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import LEARNED
from vllm_kvevict.settings.profile import Profile

OWN = 0.3
"""Exponent of how far a trial is from what trials of its budget say on average.

Among requests of one kind an audit's rank correlation with the answer's loss is 0.1 to 0.2: most
of what it says of its own request is noise. With 1 in its place requests of the same loss kept 1.8
times as much as one budget for all of them would (benchmarks/results/audit_probe_prose.json)."""

BEYOND = 1.5
"""Times its audit that an answer loses on average under a policy that scores by the window: the
audit reads the very window by which was chosen (ada-defensive:
benchmarks/results/target_ada_defensive.md)."""


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

    def loss(self, policy: str, share: str, nats: float) -> float:
        """Nats that the answer is expected to lose.

        Args:
            policy: The request's.
            share: Budget of the trial, as in ``RUNGS``.
            nats: KL divergence that the trial's audit found, at least 0.

        """
        if policy not in LEARNED:
            return BEYOND * nats
        if share not in self._usual:
            return nats
        audit, answer = self._usual[share]
        return answer * (nats / audit) ** OWN
