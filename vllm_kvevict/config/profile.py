"""The model's profile, as every process has it: shares of the budget, and where probes lie."""

from collections.abc import Sequence
from math import fsum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

TOLERANCE = 1e-3
"""What the mean of shares may differ from 1, which rounding in a file makes it do."""


class ModelIdentity(BaseModel):
    """Whose profile this is.

    Args:
        architecture: Name of the model's class.
        layers: Layers that evict, in the whole model.
        kv_heads: KV heads of a layer, over all ranks.
        config: Hash of the configuration's shape.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    layers: int = Field(ge=2)
    kv_heads: int = Field(ge=1)
    config: str

    def __str__(self) -> str:
        return (
            f"{self.architecture} ({self.layers} layers that evict, {self.kv_heads} KV heads, "
            f"configuration {self.config})"
        )


class ProbeFile(BaseModel):
    """Where a process reads the weights of the probes; too many numbers for a configuration.

    Args:
        file: Absolute path of the profile.
        sha256: Digest of that file's bytes.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str


class Profile(BaseModel):
    """What was measured of a model, once.

    Args:
        model: Whose it is.
        policy: Whose scores ranked the pages of all layers together.
        budget: Tokens, or a share of the prompt, at which they were ranked.
        made: How: prompts, tokens, versions; nothing reads it.
        layers: Share of each layer that evicts, by depth: what it keeps beside the window
            relative to the mean over all layers. They average 1.
        heads: Share of each KV head of each layer, relative to the mean over the layer; each
            layer's average 1. None where they were not measured.
        quality: What answers of held-out prompts lose, by budget; nothing reads it.
        probe: Where the probes' weights are; None where none were learned.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelIdentity
    policy: str
    budget: int | str
    made: dict[str, Any] = Field(default_factory=dict)
    layers: tuple[float, ...]
    heads: tuple[tuple[float, ...], ...] | None = None
    quality: dict[str, Any] = Field(default_factory=dict)
    probe: ProbeFile | None = None

    @model_validator(mode="after")
    def _shares_of_the_model(self) -> Self:
        if len(self.layers) != self.model.layers:
            raise ValueError(
                f"{len(self.layers)} shares by layer do not fit its own {self.model.layers} layers"
            )
        _check_mean(self.layers, "shares by layer")
        if self.heads is None:
            return self
        model = self.model
        if [len(row) for row in self.heads] != [model.kv_heads] * model.layers:
            raise ValueError(
                f"shares by KV head must be {model.layers} rows of {model.kv_heads} numbers"
            )
        for index, row in enumerate(self.heads):
            _check_mean(row, f"shares by KV head of layer {index}")
        return self


def _check_mean(shares: Sequence[float], what: str) -> None:
    mean = fsum(shares) / len(shares)
    # False for NaN as well.
    if not (min(shares) > 0 and abs(mean - 1) <= TOLERANCE):
        raise ValueError(f"{what} must be above 0 and average 1, not {mean:.4g}")


def parse(value: Any) -> Profile:
    """A profile from JSON, its probes put aside.

    Raises:
        ValueError: In one sentence, what is wrong with it.

    """
    try:
        return Profile.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}" if where else message) from None
