"""Configuration of KV eviction: one model, read by flags, Python API and every process."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_kvevict.schedule.layers import by_layer, pyramid
from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.names import COMPARABLE, POLICY_NAMES, PYRAMIDS, keeps_by_layer
from vllm_kvevict.settings.plugins import policy_names, unknown
from vllm_kvevict.settings.shares import LayerShares, parse

KEY = "kv_eviction"
"""Key of the configuration in ``VllmConfig.additional_config``."""

NONE = "none"
"""What a request or a server says for no eviction."""


def parse_budget(value: Any) -> int | str:
    """Read a budget.

    Returns:
        Tokens, or a share written as ``"25%"``.

    Raises:
        ValueError: The value is neither; the message names no flag.

    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError("must be at least 1 token")
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return parse_budget(int(text))
        if text.endswith("%"):
            try:
                share = float(text[:-1])
            except ValueError:
                share = -1.0
            if 0 < share <= 100:
                return f"{share:g}%"
    raise ValueError(f"give tokens (1024) or a share of the prompt (25%), not {value!r}")


def budget_tokens(budget: int | str) -> int | None:
    """A parsed budget in tokens, or None where it is a share."""
    return budget if isinstance(budget, int) else None


def budget_share(budget: int | str) -> float | None:
    """A parsed budget as a share in (0, 1], or None where it is in tokens."""
    return float(budget[:-1]) / 100 if isinstance(budget, str) else None


class EvictionConfig(BaseModel):
    """Everything that can be set about KV eviction.

    The command line spells a field ``x`` as ``--kv-eviction-x`` and ``policy`` as
    ``--kv-eviction``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field(description="What decides which tokens are kept.")
    budget: int | str = Field(
        default=1024,
        description=(
            "Tokens kept per KV head (average over the heads of a layer, window included), "
            "or a share of the prompt such as 25%."
        ),
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
    groups: int = Field(
        default=4,
        ge=2,
        strict=True,
        description=(
            "Groups of layers with budgets of their own, under --kv-eviction-layers, pyramidkv and "
            "ada-pyramid; at most one a layer."
        ),
    )
    layers: str | LayerShares | None = Field(
        default=None,
        description=(
            "Shares of the budget by layer, measured by python -m vllm_kvevict.calibrate: a file, "
            "or auto for one that ships for this model."
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
    allow: tuple[str, ...] = Field(
        default=(),
        description=(
            "Further policies that a request may choose in vllm_xargs, comma separated; none "
            "lets it switch eviction off for itself."
        ),
    )
    max_budget: int | str | None = Field(
        default=None,
        description=(
            "Most that a request may ask for as its budget: tokens, or a share of the prompt. "
            "It may then neither ask for none nor evict less often than the server."
        ),
    )

    shared_blocks: Literal["keep", "evict"] = Field(
        default="keep",
        description=(
            "What an eviction does that would take more blocks than it gives back, because other "
            "requests hold the same prefix: keep waits for the next interval, evict runs it, so "
            "that tokens do not depend on who shares the prefix."
        ),
    )
    attention: Literal["auto", "flash", "triton", "xformers"] = Field(
        default="auto",
        description=(
            "Attention of evicted requests on a GPU: flash (FlashAttention), triton (a decode "
            "kernel that reads the eviction state), xformers (its memory-efficient attention; "
            "decode steps without FULL graphs), or auto: flash where it runs, else triton."
        ),
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

    @field_validator("max_budget", mode="before")
    @classmethod
    def _parse_max_budget(cls, value: Any) -> int | str | None:
        return None if value is None else parse_budget(value)

    @field_validator("layers", mode="before")
    @classmethod
    def _parse_layers(cls, value: Any) -> str | LayerShares | None:
        if value is None or isinstance(value, LayerShares) or (isinstance(value, str) and value):
            return value
        if isinstance(value, dict):
            return parse(value)
        raise ValueError(f"give a file of shares, or auto, not {value!r}")

    @field_validator("allow", mode="before")
    @classmethod
    def _known_policies(cls, value: Any) -> tuple[str, ...]:
        names = value
        if isinstance(value, str):
            names = [name.strip() for name in value.split(",") if name.strip()]
        if not isinstance(names, (list, tuple)):
            raise ValueError(f"give policies separated by commas, not {value!r}")
        known = (*policy_names(), NONE)
        for name in names:
            if name not in known:
                raise ValueError(unknown(name, known))
        return tuple(name for name in known if name in names)

    @field_validator("pool_kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"must be odd, not {value}")
        return value

    @model_validator(mode="after")
    def _room_beside_window(self) -> Self:
        if self.budget_tokens is not None and self.budget_tokens <= self.window:
            raise ValueError(
                f"budget {self.budget_tokens} leaves no room beside the window of "
                f"{self.window} tokens; raise --kv-eviction-budget or lower --kv-eviction-window"
            )
        return self

    @model_validator(mode="after")
    def _one_source_of_shares(self) -> Self:
        if self.layers is None:
            return self
        for name in self.policies:
            if name in PYRAMIDS:
                raise ValueError(
                    f"--kv-eviction-layers and {name} both give layers budgets of their own; "
                    "choose one of the two"
                )
        if self.policy not in COMPARABLE:
            raise ValueError(
                "--kv-eviction-layers needs a policy whose scores compare across layers "
                f"({', '.join(COMPARABLE)}), not {self.policy}"
            )
        return self

    @model_validator(mode="after")
    def _cap_means_something(self) -> Self:
        if self.max_budget is not None and NONE in self.allow:
            raise ValueError(
                "--kv-eviction-allow lists none, which --kv-eviction-max-budget rules out; "
                "give one of the two"
            )
        cap, budget = self.max_budget, self.budget
        comparable = cap is not None and isinstance(cap, int) == isinstance(budget, int)
        if comparable and float(str(budget).rstrip("%")) > float(str(cap).rstrip("%")):
            raise ValueError(
                f"--kv-eviction-max-budget {cap} is below the budget of {budget} that every "
                "request has; raise it or lower --kv-eviction-budget"
            )
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """The server's policy, then the others that a request may choose, without none."""
        return self.policy, *(n for n in self.allow if n not in (self.policy, NONE))

    @property
    def choices(self) -> tuple[str, ...]:
        """What a request may give as ``kv_eviction``."""
        return self.policies + ((NONE,) if NONE in self.allow else ())

    @property
    def budget_tokens(self) -> int | None:
        """Budget in tokens, or None where it is a share of the prompt."""
        return budget_tokens(self.budget)

    @property
    def budget_share(self) -> float | None:
        """Budget as a share of the prompt in (0, 1], or None where it is in tokens."""
        return budget_share(self.budget)

    def least_slots(self, policy: str) -> int:
        """Tokens that a head must keep beside protected ones under ``policy``."""
        return self.cluster_samples + 2 if policy == "subgen-stream" else 0

    def timeline(self, block_size: int) -> Timeline:
        """The eviction schedule for blocks of ``block_size`` tokens where layers are alike."""
        return Timeline(
            block_size=block_size,
            window=self.window,
            interval=self.interval,
            budget_tokens=self.budget_tokens,
            budget_share=self.budget_share,
        )

    @property
    def has_groups(self) -> bool:
        """Whether layers have budgets of their own under a policy that may be chosen."""
        return self.layers is not None or any(name in PYRAMIDS for name in self.policies)

    def keeps_by_layer(self, policy: str) -> bool:
        """Whether layers have budgets of their own under ``policy``."""
        return self.has_groups and keeps_by_layer(policy, self.layers is not None)

    def timelines(self, block_size: int, layers: int) -> tuple[Timeline, ...]:
        """The eviction schedule of each layer that evicts, by depth; equal inside a group.

        Where shares are measured, :attr:`layers` must hold them, not the file's name.
        """
        rule = self.timeline(block_size)
        if not self.has_groups:
            return (rule,) * layers
        if self.layers is None:
            falling = pyramid(layers, self.beta)
            shares = by_layer(falling, self.groups, steepest=falling[0])
        else:
            assert isinstance(self.layers, LayerShares) and len(self.layers.layers) == layers
            shares = by_layer(self.layers.layers, self.groups)
        return tuple(replace(rule, share=share) for share in shares)

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        """Read ``additional_config["kv_eviction"]``: a policy name, a mapping, or None.

        None, False, "none" and "off", also as the policy of a mapping, switch eviction off.

        Returns:
            The configuration, or None where eviction is off.

        Raises:
            ValueError: In one sentence, which flag is wrong and what it may be.

        """
        if isinstance(value, cls):
            return value
        policy = value.get("policy", "") if isinstance(value, dict) else value
        if policy is None or policy is False or policy in (NONE, "off"):
            return None
        if isinstance(value, str):
            value = {"policy": value}
        if not isinstance(value, dict):
            raise ValueError(
                f"KV eviction: additional_config[{KEY!r}] must be a policy name "
                f"({', '.join(policy_names())}) or a mapping, not {value!r}"
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ValueError(_one_sentence(error)) from None


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--kv-eviction" if name == "policy" else f"--kv-eviction-{name.replace('_', '-')}"


def _one_sentence(error: ValidationError) -> str:
    known = ", ".join(EvictionConfig.model_fields)
    parts = []
    for item in error.errors():
        where = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("extra_forbidden", "invalid_key"):
            key = item["loc"][0] if item["type"] == "extra_forbidden" else item["input"]
            parts.append(f"unknown key {key!r} in {KEY!r} (known: {known})")
        elif item["type"] == "missing":
            parts.append(f"{flag(where)} is missing; choose from {', '.join(policy_names())}")
        elif where:
            given = "" if item["type"] == "value_error" else f", not {item['input']!r}"
            message = message.replace("Input should be", "must be")
            parts.append(f"{flag(where)}: {message}{given}")
        else:
            parts.append(message)
    return "KV eviction: " + "; ".join(parts)
