"""``--kv-eviction-options``: what one policy or a few of them read beside the settings of all."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_kvevict.config.names import POLICIES, PYRAMIDS, TABLE, plain_name
from vllm_kvevict.config.plugins import plugin_policies
from vllm_kvevict.config.sentences import shown

OF_SERVERS = ("groups", "low_mark", "high_mark")
"""Options that go with every policy."""


class PolicyOptions(BaseModel):
    """Values of all options; :func:`options_of` says which of them a policy reads.

    One model, not one a policy: a server may let requests choose among several policies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    floor: float = Field(
        default=0.2,
        ge=0,
        le=1,
        strict=True,
        allow_inf_nan=False,
        description="Share of the uniform budget that every KV head keeps under ada- policies.",
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
        default=4, ge=0, strict=True, description="First tokens that streaming-llm always keeps."
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
    beta: float = Field(
        default=20.0,
        ge=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Steepness of pyramidkv and ada-pyramid: the deepest layer keeps 1/beta of the budget "
            "beside the window."
        ),
    )
    groups: int | None = Field(
        default=None,
        ge=2,
        strict=True,
        description=(
            "Groups of layers with budgets of their own, at most one a layer. Without it 4 under "
            "pyramidkv and ada-pyramid, and under --kv-eviction-profile as few, of 8 at most, as "
            "keep layers of like share together."
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

    @field_validator("pool_kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"must be odd, not {value}")
        return value

    @model_validator(mode="after")
    def _marks_in_order(self) -> Self:
        if self.high_mark < self.low_mark:
            raise ValueError(
                f"high_mark {self.high_mark:g} is below low_mark {self.low_mark:g}; raise it or "
                "lower the other"
            )
        return self


def options_of(policy: str) -> tuple[str, ...]:
    """Names of the options that ``policy`` reads, in the model's order."""
    if policy in plugin_policies():
        # Another package may use the scorers that are here.
        mine: Iterable[str] = PolicyOptions.model_fields
    else:
        plain = plain_name(policy)
        mine = (*TABLE[plain].options, *OF_SERVERS)
        if policy != plain:
            mine = (*mine, "floor")
        if policy in PYRAMIDS:
            mine = (*mine, "beta")
    return tuple(name for name in PolicyOptions.model_fields if name in mine)


def read_options(value: Any) -> dict[str, Any]:
    """The options as they were given: a mapping, or a JSON object as the flag has it.

    Raises:
        ValueError: Neither; the message names no flag.

    """
    if isinstance(value, PolicyOptions):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"give a JSON object such as '{{\"floor\": 0.2}}', not {shown(value)}")
    return value


def check_known(given: Iterable[str], policies: Iterable[str]) -> None:
    """Refuse options that none of a server's policies reads.

    Raises:
        ValueError: In words that name the option and the valid ones.

    """
    known = {policy: options_of(policy) for policy in policies}
    for name in given:
        if not any(name in names for names in known.values()):
            readers = [policy for policy in POLICIES if name in options_of(policy)]
            belongs = f", but of {', '.join(readers)}" if readers else ""
            valid = "; ".join(f"of {policy}: {', '.join(names)}" for policy, names in known.items())
            raise ValueError(f"{name!r} is no option of {', '.join(known)}{belongs} ({valid})")
