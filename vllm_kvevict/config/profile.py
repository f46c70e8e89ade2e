"""The model's profile, as used by every process: shares of the budget, and the file of the
probes."""

from collections.abc import Sequence
from math import fsum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_kvevict.config.budget import measured_part, parse_budget

TOLERANCE = 1e-3
"""Maximum difference between the mean of shares and 1, which rounding in a file causes."""


class ModelIdentity(BaseModel):
    """Identity of the model that a profile belongs to.

    Args:
        architecture: Name of the model's class.
        layers: Number of layers that evict, in the whole model.
        kv_heads: Number of KV heads of a layer, over all ranks.
        config: Hash of the configuration's shape.
        tokenizer: Hash of a fixed text's tokens; None if it is unknown.
        weights: Values of single tensors by name, as ``stores/samples.py`` encodes them; None if
            they are unknown.
        name: Name and revision of the model; None if the weights are known.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    layers: int = Field(ge=2)
    kv_heads: int = Field(ge=1)
    config: str
    tokenizer: str | None = None
    weights: dict[str, str] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.architecture} ({self.layers} layers that evict, {self.kv_heads} KV heads, "
            f"configuration {self.config})"
        )


class ProbeFile(BaseModel):
    """File of the weights of the probes, which are too large for a configuration.

    Args:
        file: Absolute path of the profile.
        sha256: Digest of that file's bytes.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str


class Profile(BaseModel):
    """Measurements of a model.

    Args:
        model: Identity of the model.
        policy: Policy with the scores that ranked the pages of all layers together.
        budget: Budget at which they were ranked: tokens, or a share of the prompt.
        made: Description of the measurement (prompts, tokens, versions); informational only.
        layers: Share of each layer that evicts, by depth: its tokens in addition to the window,
            relative to the mean over all layers. The shares average 1.
        heads: Share of each KV head of each layer, relative to the mean over the layer. The shares
            of each layer average 1. None if they were not measured.
        quality: Loss of answers to held-out prompts, by budget; informational only.
        probe: File of the probes' weights; None if none were learned.

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

    @field_validator("budget")
    @classmethod
    def _parse_budget(cls, value: int | str) -> int | str:
        return parse_budget(value)

    @property
    def measured_at(self) -> float | None:
        """Part of the tokens that was kept where the shares were measured; None if the budget is in
        tokens, or keeps all of them."""
        return measured_part(self.budget)

    @model_validator(mode="after")
    def _shares_of_the_model(self) -> Self:
        if len(self.layers) != self.model.layers:
            raise ValueError(
                f"{len(self.layers)} shares by layer do not match the {self.model.layers} layers "
                "of the model"
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
    """Return a profile from JSON, without the weights of its probes.

    Raises:
        ValueError: The profile is invalid; the message is one sentence.

    """
    try:
        return Profile.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}" if where else message) from None
