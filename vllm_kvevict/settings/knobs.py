"""What one policy or a few of them read beside the rule of all."""

from typing import Literal

from pydantic import Field, field_validator

from vllm_kvevict.settings.names import LEARNED
from vllm_kvevict.settings.rule import Rule


class Knobs(Rule):
    """A rule with the settings of single policies."""

    floor: float = Field(
        default=0.2,
        ge=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of the uniform budget that every KV head keeps under adaptive policies."
        ),
    )
    pool_kernel: int = Field(
        default=7,
        ge=1,
        strict=True,
        description="Width of the pooling that smooths scores along the sequence; odd.",
    )
    pool: Literal["max", "avg"] = Field(
        default="max",
        description="Kind of the pooling that smooths scores: max (Ada-KV) or avg (kvpress).",
    )
    sinks: int = Field(
        default=4,
        ge=0,
        strict=True,
        description="First tokens that streaming-llm always keeps.",
    )
    recent_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of the budget that h2o gives to the most recent tokens, the window included; "
            "the rest goes to heavy hitters."
        ),
    )
    random_share: float = Field(
        default=0.67,
        ge=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of what nacl keeps beside the window that it draws at random; its best-scored "
            "tokens fill the rest."
        ),
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        strict=True,
        description=(
            "Seed of the draws of nacl and subgen-stream; a run with the same seed and prompts "
            "repeats."
        ),
    )
    radius: float = Field(
        default=0.0,
        ge=0,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Radius of subgen-stream's clusters of keys, which grows where they outgrow their "
            "slots; 0 starts with a cluster for every key."
        ),
    )
    cluster_samples: int = Field(
        default=4,
        ge=1,
        le=16,
        strict=True,
        description="Samples that subgen-stream draws from every cluster of keys.",
    )
    value_share: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of the slots beside the window that subgen-stream draws by the norm of the "
            "values; clusters and recent tokens get the rest."
        ),
    )

    probe_window: Literal["auto", "none"] = Field(
        default="auto",
        description=(
            "Whether probe joins its scores with the last queries: auto does where a ring slot was "
            "free to record them, none never does and takes no memory for them."
        ),
    )

    probe_recent: int = Field(
        default=8,
        ge=1,
        strict=True,
        description=(
            "Last tokens that probe never evicts. It scores the others of the window as well, so "
            "that few are enough."
        ),
    )

    @field_validator("pool_kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"must be odd, not {value}")
        return value

    def recent_tokens(self, policy: str) -> int:
        """As :meth:`Rule.recent_tokens`."""
        return self.probe_recent if policy in LEARNED else self.window

    def least_slots(self, policy: str) -> int:
        """Tokens that a head must keep beside protected ones under ``policy``."""
        return self.cluster_samples + 2 if policy == "subgen-stream" else 0
