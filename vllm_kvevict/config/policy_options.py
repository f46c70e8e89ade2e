"""``--kv-eviction-options``: settings of single policies, in addition to the general settings."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_kvevict.config.names import POLICIES, PYRAMIDS, TABLE, plain_name
from vllm_kvevict.config.plugins import plugin_policies
from vllm_kvevict.config.sentences import shown

OF_SERVERS = ("groups", "low_mark", "high_mark")
"""Options that apply to every policy."""


class PolicyOptions(BaseModel):
    """Values of all options. :func:`options_of` returns the options that a policy reads.

    There is one model for all policies, because a server may let requests choose among several.
    Options of a policy of another package are a mapping under its name; see :meth:`own`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

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
            "Share of the tokens outside the window that nacl keeps at random; tokens with the "
            "highest scores fill the rest."
        ),
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        strict=True,
        description=(
            "Seed of the random draws of nacl and subgen-stream; runs with the same seed and "
            "prompts are equal."
        ),
    )
    radius: float = Field(
        default=0.0,
        ge=0,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Radius of subgen-stream's clusters of keys, which grows if the clusters exceed their "
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
            "Share of the slots outside the window that subgen-stream draws by the norm of the "
            "values; clusters and recent tokens get the rest."
        ),
    )
    probe_window: Literal["auto", "none"] = Field(
        default="auto",
        description=(
            "Last queries in the scores of probe: auto includes them if a ring slot was free to "
            "record them; none never does and needs no memory for them."
        ),
    )
    probe_recent: int = Field(
        default=8,
        ge=1,
        strict=True,
        description=(
            "Last tokens that probe never evicts. A few are enough, because probe also scores the "
            "other tokens of the window."
        ),
    )
    beta: float = Field(
        default=20.0,
        ge=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Steepness of pyramidkv and ada-pyramid: the deepest layer keeps 1/beta of the budget "
            "outside the window."
        ),
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description=(
            "Groups of layers with individual budgets, at most one per layer. Default: 4 under "
            "pyramidkv and ada-pyramid; under --kv-eviction-profile, the smallest number, up to 8, "
            "that keeps layers of similar share together. 1 gives all layers the same budget and "
            "still uses the probes of --kv-eviction-profile."
        ),
    )
    low_mark: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        strict=True,
        allow_inf_nan=False,
        description=(
            "Share of free blocks at which eviction under pressure begins, in addition to blocks "
            "that running requests take while their windows are recorded."
        ),
    )
    high_mark: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        strict=True,
        allow_inf_nan=False,
        description="Share of free blocks at which eviction under pressure ends.",
    )

    def own(self, policy: str) -> dict[str, Any]:
        """Return the options of a policy of another package by name; empty if none are set.

        Its ``build`` checks them, and raises ValueError in one sentence for a wrong one.
        """
        return dict((self.model_extra or {}).get(policy, {}))

    @model_validator(mode="after")
    def _others_are_of_packages(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in plugin_policies():
                raise ValueError(f"{name!r} is no option; choose from {', '.join(self._known())}")
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise ValueError(
                    f"give the options of {name} as a JSON object, such as "
                    f'{{"{name}": {{"option": 1}}}}, not {shown(value)}'
                )
        return self

    @classmethod
    def _known(cls) -> tuple[str, ...]:
        return tuple(cls.model_fields)

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
                f"high_mark {self.high_mark:g} is below low_mark {self.low_mark:g}; raise "
                "high_mark or lower low_mark"
            )
        return self


def options_of(policy: str) -> tuple[str, ...]:
    """Return the names of the options that ``policy`` reads, in the order of the model."""
    if policy in plugin_policies():
        # A policy of another package may use the scorers of this one.
        names: Iterable[str] = PolicyOptions.model_fields
    else:
        plain = plain_name(policy)
        names = (*TABLE[plain].options, *OF_SERVERS)
        if policy != plain:
            names = (*names, "floor")
        if policy in PYRAMIDS:
            names = (*names, "beta")
    return tuple(name for name in PolicyOptions.model_fields if name in names)


def read_options(value: Any) -> dict[str, Any]:
    """Return the given options, from a mapping or from a JSON object as in the flag.

    Raises:
        ValueError: The value is neither; the message does not name a flag.

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
    """Reject options that none of a server's policies reads.

    Raises:
        ValueError: An option is not read; the message names it and the valid options.

    """
    known = {policy: options_of(policy) for policy in policies}
    for name in given:
        if name in known and name in plugin_policies():
            continue
        if not any(name in names for names in known.values()):
            readers = [policy for policy in POLICIES if name in options_of(policy)]
            belongs = f", but of {', '.join(readers)}" if readers else ""
            valid = "; ".join(f"of {policy}: {', '.join(names)}" for policy, names in known.items())
            raise ValueError(f"{name!r} is no option of {', '.join(known)}{belongs} ({valid})")
