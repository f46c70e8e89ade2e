"""Configuration of KV eviction: one model, read by flags, Python API and every process."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from vllm_kvevict.schedule.layers import by_layer, pyramid
from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.budget import parse_budget
from vllm_kvevict.settings.knobs import Knobs
from vllm_kvevict.settings.names import COMPARABLE, KEY, NONE, PYRAMIDS, keeps_by_layer
from vllm_kvevict.settings.plugins import policy_names, unknown
from vllm_kvevict.settings.profile import Profile, parse
from vllm_kvevict.settings.sentences import one_sentence

PYRAMID_GROUPS = 4


class EvictionConfig(Knobs):
    """Everything that can be set about KV eviction.

    The command line spells a field ``x`` as ``--kv-eviction-x`` and ``policy`` as
    ``--kv-eviction``.
    """

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
    profile: str | Profile | None = Field(
        default=None,
        description=(
            "The model's profile, made by python -m vllm_kvevict.calibrate: shares of the budget "
            "by layer and head, and the scores of probe. A file, or auto for one that ships for "
            "this model or that calibrate left under vLLM's cache root."
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
            "Most that a request may ask for as its budget: tokens, or a share. "
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
            "decode steps without FULL graphs), or auto: flash where it is "
            "version 3 or 4, else triton."
        ),
    )

    @field_validator("max_budget", mode="before")
    @classmethod
    def _parse_max_budget(cls, value: Any) -> int | str | None:
        return None if value is None else parse_budget(value)

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, value: Any) -> Any:
        """``layers`` is what ``profile`` was called."""
        if not isinstance(value, dict) or "layers" not in value:
            return value
        value = dict(value)
        older = value.pop("layers")
        if older is None:
            return value
        if value.get("profile") is not None:
            raise ValueError(
                "--kv-eviction-layers is an older name of --kv-eviction-profile; give one of the "
                "two"
            )
        return value | {"profile": older}

    @field_validator("profile", mode="before")
    @classmethod
    def _parse_profile(cls, value: Any) -> str | Profile | None:
        if value is None or isinstance(value, Profile) or (isinstance(value, str) and value):
            return value
        if isinstance(value, dict):
            return parse(value)
        raise ValueError(f"give a file of calibrate's, or auto, not {value!r}")

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

    @model_validator(mode="after")
    def _one_source_of_shares(self) -> Self:
        if self.profile is None:
            return self
        for name in self.policies:
            if name in PYRAMIDS:
                raise ValueError(
                    f"--kv-eviction-profile and {name} both give layers budgets of their own; "
                    "choose one of the two"
                )
        if self.policy not in COMPARABLE:
            raise ValueError(
                "--kv-eviction-profile needs a policy whose scores compare across layers "
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
        if isinstance(cap, int) and cap < self.min_budget:
            raise ValueError(
                f"--kv-eviction-max-budget {cap} is below the {self.min_budget} tokens of "
                "--kv-eviction-min-budget; raise it or lower that"
            )
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
    def has_groups(self) -> bool:
        """Whether layers have budgets of their own under a policy that may be chosen."""
        return self.profile is not None or any(name in PYRAMIDS for name in self.policies)

    @property
    def least_prefill_interval(self) -> int:
        """Fewest prompt tokens between evictions inside the prompt that a request may ask for.

        An eviction reads the window's queries once more, so that four windows bound what clients
        add to the attention of a prompt to a quarter; less where the server itself has less.
        """
        bound = 4 * self.window
        return min(bound, self.prefill_interval) if self.prefill_interval else bound

    def keeps_by_layer(self, policy: str) -> bool:
        """Whether layers have budgets of their own under ``policy``."""
        return self.has_groups and keeps_by_layer(policy, self.profile is not None)

    def timelines(self, block_size: int, layers: int) -> tuple[Timeline, ...]:
        """The eviction schedule of each layer that evicts, by depth; equal inside a group.

        Where shares are measured, :attr:`profile` must hold them, not the file's name.
        """
        rule = self.timeline(block_size)
        if not self.has_groups:
            return (rule,) * layers
        if self.profile is None:
            falling = pyramid(layers, self.beta)
            shares = by_layer(falling, self.groups or PYRAMID_GROUPS, steepest=falling[0])
        else:
            assert isinstance(self.profile, Profile) and len(self.profile.layers) == layers
            shares = by_layer(self.profile.layers, self.groups)
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
            raise ValueError(one_sentence(error, cls.model_fields)) from None
