"""What every policy needs to know: how much is kept, what observes, how often."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.budget import budget_share, budget_tokens, parse_budget
from vllm_kvevict.settings.names import POLICY_NAMES
from vllm_kvevict.settings.plugins import policy_names, unknown


class Rule(BaseModel):
    """A policy, its budget and its schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field(description="What decides which tokens are kept.")
    budget: int | str = Field(
        default=1024,
        description=(
            "Tokens kept per KV head (average over the heads of a layer, the last ones included), "
            "or a share such as 25% of the tokens so far, prompt and answer."
        ),
    )
    min_budget: int = Field(
        default=0,
        ge=0,
        strict=True,
        description="Tokens per KV head that a budget given as a share comes to at least.",
    )
    window: int = Field(
        default=32,
        ge=1,
        strict=True,
        description="Observation window: the last tokens, whose queries score the others.",
    )
    interval: int = Field(
        default=128,
        ge=0,
        strict=True,
        description=(
            "Decode steps between evictions, rounded up to whole blocks; 0 evicts after "
            "prefill only."
        ),
    )
    prefill_interval: int = Field(
        default=0,
        ge=0,
        strict=True,
        description=(
            "Prompt tokens between evictions inside a prompt, rounded up to whole blocks: it then "
            "never holds more than its budget and so many tokens, and may be longer than the KV "
            "cache; 0 evicts where the prompt ends."
        ),
    )
    when: Literal["always", "pressure"] = Field(
        default="always",
        description=(
            "When requests are evicted to their budgets: always, or under pressure only, when free "
            "blocks fall below the low mark; those that give back most come first."
        ),
    )
    low_mark: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of the blocks that are free when eviction under pressure begins, beside those "
            "that running requests take while their windows are recorded."
        ),
    )
    high_mark: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        strict=True,
        allow_inf_nan=False,
        description="Share of the blocks that are free when eviction under pressure ends.",
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _known_policy(cls, value: Any) -> str:
        if isinstance(value, str) and (value in POLICY_NAMES or value in policy_names()):
            return value
        raise ValueError(unknown(value, policy_names()))

    @field_validator("budget", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any) -> int | str:
        return parse_budget(value)

    @model_validator(mode="after")
    def _room_beside_window(self) -> Self:
        # A policy that a request chooses has the server's budget, too.
        recent = max(map(self.recent_tokens, self.policies))
        if self.budget_tokens is not None and self.budget_tokens <= recent:
            what, flag = f"the window of {recent} tokens", "window"
            if recent != self.window:
                what, flag = f"the last {recent} tokens, which stay", "probe-recent"
            raise ValueError(
                f"budget {self.budget_tokens} leaves no room beside {what}; raise "
                f"--kv-eviction-budget or lower --kv-eviction-{flag}"
            )
        return self

    @model_validator(mode="after")
    def _prefill_evicts(self) -> Self:
        if self.prefill_interval and self.when == "pressure":
            raise ValueError(
                "--kv-eviction-prefill-interval evicts every long prompt, and --kv-eviction-when "
                "pressure only where memory is short; choose one of the two"
            )
        if self.prefill_interval and self.budget_tokens is None:
            raise ValueError(
                "--kv-eviction-prefill-interval bounds what a prompt holds, and a share of it "
                f"grows with it; give --kv-eviction-budget in tokens, not {self.budget}"
            )
        return self

    @model_validator(mode="after")
    def _marks_in_order(self) -> Self:
        if self.high_mark < self.low_mark:
            raise ValueError(
                f"--kv-eviction-high-mark {self.high_mark:g} is below --kv-eviction-low-mark "
                f"{self.low_mark:g}; raise it or lower the other"
            )
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that a request may run under."""
        return (self.policy,)

    @property
    def budget_tokens(self) -> int | None:
        """Budget in tokens, or None where it is a share."""
        return budget_tokens(self.budget)

    @property
    def budget_share(self) -> float | None:
        """Budget as a share of the tokens so far in (0, 1], or None where it is in tokens."""
        return budget_share(self.budget)

    def timeline(self, block_size: int) -> Timeline:
        """The eviction schedule for blocks of ``block_size`` tokens where layers are alike."""
        recent = self.recent_tokens(self.policy)
        return Timeline(
            block_size=block_size,
            window=self.window,
            interval=self.interval,
            budget_tokens=self.budget_tokens,
            budget_share=self.budget_share,
            least=self.min_budget,
            prefill_interval=self.prefill_interval,
            recent=None if recent == self.window else recent,
        )

    def recent_tokens(self, policy: str) -> int:
        """The last tokens that ``policy`` never evicts: the window, where it has no say."""
        return self.window
