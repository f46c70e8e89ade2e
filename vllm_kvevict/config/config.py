"""Configuration of KV eviction: one model for flags, the Python API and every process."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from vllm_kvevict.config.audit_share import Share, parse_share
from vllm_kvevict.config.budget import (
    Budget,
    Cap,
    budget_share,
    budget_tokens,
    check_cap,
    check_exceeds_recent,
    min_budget_tokens,
)
from vllm_kvevict.config.names import (
    AUTO,
    COMPARABLE,
    CONFIG_KEY,
    LEARNED,
    NONE,
    PYRAMIDS,
    keeps_by_layer,
)
from vllm_kvevict.config.plugins import policy_names, unknown
from vllm_kvevict.config.policy_options import PolicyOptions, check_known, read_options
from vllm_kvevict.config.profile import Profile, parse
from vllm_kvevict.config.sentences import one_sentence
from vllm_kvevict.config.store_tiers import Folder, Size, parse_size
from vllm_kvevict.ops.token_format import AS_CACHED, INT4, INT4_FP8, INT8, TokenFormat
from vllm_kvevict.rules.layers import by_layer, pyramid
from vllm_kvevict.rules.rule import MIN_INTERVAL_WINDOWS, EvictionRule

PYRAMID_GROUPS = 4

EVERY_MIN_TOKENS = 128
"""Minimum of a share under ``--kv-eviction-every``. The first evictions of a conversation choose
from few tokens: 25% of 64 has no room for a fact of 25 tokens, which a later eviction keeps."""


class EvictionConfig(BaseModel):
    """All settings of KV eviction.

    A field ``x`` is ``--kv-eviction-x`` on the command line, and ``policy`` is ``--kv-eviction``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field(
        description=(
            "Policy that selects the tokens to keep. auto: probe if there is a profile of this "
            "model that it can use, else ada-defensive."
        )
    )
    budget: Budget = Field(
        default=1024,
        description=(
            "Tokens kept per KV head (average over the heads of a layer, the last ones included), "
            "or a share such as 25% of the tokens so far, prompt and answer; 25%,min=256 keeps "
            "at least 256; or loss=0.05, the smallest share at which answers lose less by the "
            "profile, in nats per token. auto uses loss=0.05 if the profile has losses, else the "
            "profile's budget, or 25%, or max-budget if that is less."
        ),
    )
    window: int = Field(
        default=32,
        ge=1,
        strict=True,
        description="Observation window: number of last tokens. Their queries score the others.",
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
            "Prompt tokens between evictions inside a prompt, rounded up to whole blocks. The "
            "prompt then never holds more than its budget and this number of tokens, and may be "
            "longer than the KV cache; 0 evicts at the end of the prompt."
        ),
    )
    every: int = Field(
        default=0,
        ge=0,
        strict=True,
        description=(
            "Tokens of prompt and answer between evictions, counted from the start of the prompt "
            "and rounded up to whole blocks, in place of evictions at the end of the prompt and "
            "in intervals. A request that begins with the tokens of another one, such as the next "
            "turn of a conversation, continues from what was kept; 0 for no such evictions."
        ),
    )
    when: Literal["always", "pressure"] = Field(
        default="always",
        description=(
            "When requests are evicted to their budgets: always, or under pressure only, when free "
            "blocks run short; requests that free the most blocks come first."
        ),
    )
    profile: str | Profile | None = Field(
        default=None,
        description=(
            "The model's profile, made by vllm-kvevict calibrate: shares of the budget "
            "by layer and head, and the scores of probe. A file; auto for a profile that ships "
            "for this model or that calibrate stored under vLLM's cache root; calibrate as auto, "
            "but makes one if there is none; none for no profile. Without the flag, "
            "--kv-eviction auto calibrates as well, and does without a profile if it cannot."
        ),
    )
    calibrate_seconds: float = Field(
        default=900.0,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Maximum number of seconds in which start-up calibrates a model that has no profile."
        ),
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description=(
            "Further policies that a request may choose in vllm_xargs, comma separated; none "
            "allows a request to switch eviction off."
        ),
    )
    max_budget: Cap = Field(
        default=None,
        description=(
            "Maximum budget that a request may ask for: tokens, or a share. "
            "Requests may then not switch eviction off, and their intervals are the server's."
        ),
    )
    protect_system: bool = Field(
        default=False,
        description=(
            "Protect the system prompt and the tool definitions of chats: true or false. No head "
            "evicts them, and they are kept in addition to the budget."
        ),
    )
    shared_blocks: Literal["keep", "evict"] = Field(
        default="keep",
        description=(
            "Handling of evictions that would take more blocks than they free, because other "
            "requests hold the same prefix: keep waits for the next interval; evict runs them, "
            "so that tokens do not depend on other requests with the same prefix."
        ),
    )
    attention: Literal["auto", "flash", "triton", "xformers"] = Field(
        default="auto",
        description=(
            "Attention of evicted requests on a GPU: flash (FlashAttention), triton (a decode "
            "kernel that reads the eviction state), xformers (its memory-efficient attention; "
            "decode steps without FULL graphs), or auto: flash with "
            "FlashAttention 4, or with FlashAttention 3 and an FP8 cache; else triton."
        ),
    )
    kernels: Literal["required", "optional"] = Field(
        default="required",
        description=(
            "CUDA kernels of evictions on a GPU. required: a server whose policies have kernels "
            "does not start if they are not installed or cannot run; optional: PyTorch operations "
            "run instead, which take longer."
        ),
    )
    ring_memory: Size = Field(
        default="512M",
        description=(
            "Maximum memory of the observation rings of one rank, such as 2G. They hold the "
            "windows of the requests that evict next; with fewer slots than running requests need, "
            "requests evict less often."
        ),
    )
    store_memory: Size = Field(
        default=0,
        description=(
            "Host memory of all ranks together, such as 4G, for stores of kv_eviction_at or "
            "--kv-eviction-every that leave the KV cache. They are restored instead of computing a "
            "prefill."
        ),
    )
    store_path: Folder | None = Field(
        default=None,
        description=(
            "Folder for stores of kv_eviction_at or --kv-eviction-every, such as DIR,max=100G; "
            "without max, files take at most half of the free space. They survive a restart, and "
            "equal servers share them. Users with write access may change answers."
        ),
    )
    store_dtype: Literal["auto", "int8", "int4", "int4_fp8"] = Field(
        default="auto",
        description=(
            "Type in which evictions store the tokens that they keep. A block holds 3.75 times as "
            "many tokens of int4 and 1.875 times as many of int8, and a budget in percent is a "
            "share of the memory then; auto is the type of the KV cache. With an FP8 cache int4 "
            "means int4_fp8, of which a block holds 1.875 times as many."
        ),
    )
    audit: Share = Field(
        default=0,
        description=(
            "Share of the requests, such as 1%, with measured evictions: their last tokens are "
            "computed again over the remaining cache, and compared."
        ),
    )
    options: PolicyOptions = Field(
        default=PolicyOptions(),
        description=(
            "Options of single policies as a JSON object, such as '{\"floor\": 0.2}', or "
            "--kv-eviction-options.floor 0.2."
        ),
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _known_policy(cls, value: Any) -> str:
        if isinstance(value, str) and (value == AUTO or value in policy_names()):
            return value
        raise ValueError(unknown(value, (*policy_names(), AUTO)))

    @field_validator("profile", mode="before")
    @classmethod
    def _parse_profile(cls, value: Any) -> str | Profile | None:
        if value is None or value == NONE:
            return None
        if isinstance(value, Profile) or (isinstance(value, str) and value):
            return value
        if isinstance(value, dict):
            return parse(value)
        raise ValueError(
            f"give auto, calibrate, none, or a file of vllm-kvevict calibrate, not {value!r}"
        )

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

    @field_validator("options", mode="before")
    @classmethod
    def _read_options(cls, value: Any, info: Any) -> dict[str, Any]:
        given = read_options(value)
        policy = info.data.get("policy")
        if policy is not None and policy != AUTO:
            check_known(given, (policy, *(n for n in info.data.get("allow", ()) if n != NONE)))
        return given

    @field_serializer("options")
    def _only_given(self, options: PolicyOptions) -> dict[str, Any]:
        return options.model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="after")
    def _room_beyond_window(self) -> Self:
        # A policy that a request chooses also uses the server's budget.
        if self._has_budget:
            check_exceeds_recent(
                self.budget, max(map(self.recent_tokens, self.policies)), self.window
            )
        return self

    @model_validator(mode="after")
    def _prefill_evicts(self) -> Self:
        if self.prefill_interval and self.when == "pressure":
            raise ValueError(
                "--kv-eviction-prefill-interval evicts every long prompt, but --kv-eviction-when "
                "pressure evicts only when memory is short; choose one of the two"
            )
        if self.prefill_interval and self.budget_tokens is None:
            raise ValueError(
                "--kv-eviction-prefill-interval limits the tokens that a prompt holds, but a share "
                f"grows with the prompt; give --kv-eviction-budget in tokens, not {self.budget}"
            )
        return self

    @model_validator(mode="after")
    def _every_stands_alone(self) -> Self:
        if not self.every:
            return self
        if self.every < self.window:
            raise ValueError(
                f"--kv-eviction-every {self.every} is shorter than the observation window; give at "
                f"least {self.window} tokens, or 0"
            )
        for given, flag in (
            (self.prefill_interval, "--kv-eviction-prefill-interval"),
            (self.when == "pressure", "--kv-eviction-when pressure"),
            (self.audits, "--kv-eviction-audit"),
        ):
            if given:
                raise ValueError(
                    f"--kv-eviction-every cannot be combined with {flag}; remove one of the two"
                )
        return self

    @model_validator(mode="after")
    def _one_source_of_shares(self) -> Self:
        if self.profile is None:
            return self
        for name in self.policies:
            if name in PYRAMIDS:
                raise ValueError(
                    f"--kv-eviction-profile and {name} both set individual budgets of layers; "
                    "choose one of the two"
                )
        if self.policy not in (AUTO, *COMPARABLE):
            raise ValueError(
                "--kv-eviction-profile needs a policy with scores that compare across layers "
                f"({', '.join(COMPARABLE)}), not {self.policy}"
            )
        return self

    @model_validator(mode="after")
    def _pyramids_have_groups(self) -> Self:
        if self.options.groups == 1 and (names := [n for n in self.policies if n in PYRAMIDS]):
            raise ValueError(
                f"the option groups of --kv-eviction-options is 1, which gives all layers one "
                f"budget, but {names[0]} gives them individual budgets; set groups to at least 2 "
                "or choose another policy"
            )
        return self

    @model_validator(mode="after")
    def _cap_means_something(self) -> Self:
        if self.max_budget is not None and NONE in self.allow:
            raise ValueError(
                "--kv-eviction-allow lists none, which --kv-eviction-max-budget rules out; "
                "give one of the two"
            )
        if self.max_budget is not None and self._has_budget:
            check_cap(self.budget, self.max_budget)
        return self

    @property
    def _has_budget(self) -> bool:
        """True if the budget is known. auto chooses one later if none was set."""
        return self.policy != AUTO or "budget" in self.model_fields_set

    @property
    def budget_tokens(self) -> int | None:
        """Budget in tokens, or None if it is a share."""
        return budget_tokens(self.budget)

    @property
    def budget_share(self) -> float | None:
        """Budget as a share of the tokens so far in (0, 1], or None if it is in tokens."""
        return budget_share(self.budget)

    @property
    def policies(self) -> tuple[str, ...]:
        """The server's policy, then the others that a request may choose, excluding none."""
        return self.policy, *(n for n in self.allow if n not in (self.policy, NONE))

    @property
    def has_tiers(self) -> bool:
        """True if stores are also kept outside the KV cache."""
        return parse_size(self.store_memory) > 0 or self.store_path is not None

    @property
    def audits(self) -> bool:
        """True if some evictions are replayed."""
        return parse_share(self.audit) > 0

    @property
    def choices(self) -> tuple[str, ...]:
        """Valid values of ``kv_eviction`` in a request."""
        return self.policies + ((NONE,) if NONE in self.allow else ())

    @property
    def has_groups(self) -> bool:
        """True if layers have individual budgets under a policy that may be chosen."""
        if self.options.groups == 1:
            return False
        return self.profile is not None or any(name in PYRAMIDS for name in self.policies)

    @property
    def min_prefill_interval(self) -> int:
        """Minimum number of prompt tokens between evictions inside the prompt that a request may
        ask for.

        An eviction reads the window's queries again. With at least four windows between evictions,
        clients add at most a quarter to the attention of a prompt. The minimum is lower if the
        server's own interval is.
        """
        return self._min_interval(self.prefill_interval)

    @property
    def min_every(self) -> int:
        """Minimum number of tokens between evictions at fixed positions that a request may ask
        for, other than 0."""
        return self._min_interval(self.every)

    def _min_interval(self, own: int) -> int:
        bound = MIN_INTERVAL_WINDOWS * self.window
        return min(bound, own) if own else bound

    def recent_tokens(self, policy: str) -> int:
        """Return the number of last tokens that ``policy`` never evicts."""
        return self.options.probe_recent if policy in LEARNED else self.window

    def min_slots(self, policy: str) -> int:
        """Return the number of tokens that a head must keep in addition to protected ones under
        ``policy``."""
        return self.options.cluster_samples + 2 if policy == "subgen-stream" else 0

    def keeps_by_layer(self, policy: str) -> bool:
        """Return whether layers have individual budgets under ``policy``."""
        return self.has_groups and keeps_by_layer(policy, self.profile is not None)

    @property
    def token_format(self) -> TokenFormat:
        """Format of the tokens of stores."""
        formats = {"auto": AS_CACHED, "int8": INT8, "int4": INT4, "int4_fp8": INT4_FP8}
        return formats[self.store_dtype]

    @property
    def _min_tokens(self) -> int:
        """Minimum tokens per KV head of a budget that is a share."""
        least = min_budget_tokens(self.budget)
        return EVERY_MIN_TOKENS if self.every and not least else least

    def rule(self, block_size: int) -> EvictionRule:
        """Return the eviction rule for blocks of ``block_size`` tokens if all layers have the same
        budget."""
        recent = self.recent_tokens(self.policy)
        return EvictionRule(
            block_size=block_size,
            window=self.window,
            interval=self.interval,
            budget_tokens=self.budget_tokens,
            budget_share=self.budget_share,
            min_tokens=self._min_tokens,
            prefill_interval=self.prefill_interval,
            every=self.every,
            recent=None if recent == self.window else recent,
            page_tokens=self.token_format.page_tokens(block_size),
        )

    def layer_rules(self, block_size: int, *stages: int) -> tuple[EvictionRule, ...]:
        """Return the eviction rule of each layer that evicts, by depth; equal inside a group.

        ``stages`` counts the layers of each pipeline stage. If shares are measured, :attr:`profile`
        must contain them, not a file name.
        """
        rule, groups, layers = self.rule(block_size), self.options.groups, sum(stages)
        if not self.has_groups:
            return (rule,) * layers
        if self.profile is None:
            falling = pyramid(layers, self.options.beta)
            shares = by_layer(falling, groups or PYRAMID_GROUPS, falling[0], stages)
        else:
            assert isinstance(self.profile, Profile) and len(self.profile.layers) == layers
            at = self.profile.measured_at
            shares = by_layer(self.profile.layers, groups, None, stages, at)
        return tuple(replace(rule, share=share) for share in shares)

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        """Read ``additional_config["kv_eviction"]``: a policy name, a mapping, or None.

        None, False, "none" and "off", also as the policy of a mapping, switch eviction off.

        Returns:
            The configuration, or None if eviction is off.

        Raises:
            ValueError: A setting is wrong; the message names the flag and its valid values in one
                sentence.

        """
        if isinstance(value, cls):
            return value
        policy = value.get("policy", "") if isinstance(value, dict) else value
        if policy is None or policy is False or policy in (NONE, "off"):
            return None
        value = {"policy": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise ValueError(
                f"KV eviction: additional_config[{CONFIG_KEY!r}] must be a policy name "
                f"({', '.join((*policy_names(), AUTO))}) or a mapping, not {value!r}"
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ValueError(one_sentence(error, cls.model_fields)) from None
