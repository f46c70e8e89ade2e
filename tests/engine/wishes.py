"""What random requests ask for themselves."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from benchmarks.bare_scheduler import Setup


@dataclass(frozen=True)
class Wish:
    """A request's own settings, before the length of its prompt is known.

    ``at`` is a share of the prompt; a budget in tokens is counted beside the window, protected
    tokens in blocks.
    """

    policy: str | None
    budget: int | str | None
    interval: int | None
    protect: float
    at: float | None
    from_end: bool
    when: str | None = None
    prefill: int | None = None
    every: int | None = None

    def asked(self, setup: Setup, length: int) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        if self.policy is not None:
            asked["kv_eviction"] = self.policy
        if self.budget is not None:
            share = isinstance(self.budget, str)
            asked["kv_eviction_budget"] = self.budget if share else setup.window + self.budget
        if self.interval is not None:
            asked["kv_eviction_interval"] = self.interval
        if self.protect:
            asked["kv_eviction_protect_first"] = int(self.protect * setup.block_size)
        if self.at is not None:
            point = max(1, round(self.at * length))
            backwards = self.from_end and point < length
            asked["kv_eviction_at"] = str(point - length) if backwards else point
        if self.when is not None:
            asked["kv_eviction_when"] = self.when
        prefill = setup.prefill_interval if self.prefill is None else self.prefill
        budget = setup.budget if self.budget is None else self.budget
        if prefill and (isinstance(budget, str) or (self.when or setup.when) == "pressure"):
            prefill = 0  # Refused together.
        if prefill != setup.prefill_interval:
            asked["kv_eviction_prefill_interval"] = prefill
        if self.every is not None:
            asked["kv_eviction_every"] = self.every
        elif setup.every and self.when == "pressure":
            asked["kv_eviction_every"] = 0  # Refused together.
        return asked


WISHES = st.one_of(
    st.none(),
    st.builds(
        Wish,
        policy=st.sampled_from([None, None, "snapkv", "streaming-llm", "h2o", "none"]),
        budget=st.one_of(st.none(), st.integers(1, 120), st.sampled_from(["5%", "40%"])),
        interval=st.sampled_from([None, 0, 4, 16, 64]),
        protect=st.sampled_from([0, 0, 0.5, 1.0, 2.6]),
        at=st.one_of(st.none(), st.floats(0.1, 1.0), st.floats(0.4, 0.95)),
        from_end=st.booleans(),
        when=st.sampled_from([None, None, "always", "pressure"]),
        prefill=st.sampled_from([None, None, 0, 64, 100]),
    ),
)
