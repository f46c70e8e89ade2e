"""Resolves ``--kv-eviction auto``: the best policy that this model and this server can run."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvevict.config.budget import budget_loss, check_cap
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving.loss import losses, memory_for
from vllm_kvevict.serving.profile import AUTO, load
from vllm_kvevict.serving.support import check

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_eviction.auto")

WITH_PROFILE = "probe"
WITHOUT_PROFILE = "ada-defensive"
LATENT = "snapkv"
"""Of a latent cache, which has one head and no values."""
LOSS = 0.05
"""Nats per token that answers may lose, where no budget was set and the profile has losses."""
BUDGET = "25%"
"""Where no profile says which budget it was made for."""


def recommended(
    vllm_config: "VllmConfig", config: EvictionConfig, uncalibrated: str | None = None
) -> EvictionConfig:
    """The configuration with a policy, and with the budget and the profile that go with it.

    What was set by hand stays. A budget that differs from :data:`BUDGET` is named in a warning.
    Without evictions inside prompts, which need a budget in tokens,
    the budget is the smallest at which answers lose less than :data:`LOSS` where the profile says
    what they lose, else the profile's, or :data:`BUDGET`; but not above the cap on those of
    requests.

    Args:
        vllm_config: As vLLM built it.
        config: The settings, of the policy ``auto``.
        uncalibrated: Why the model could not be calibrated; None if it was not tried.

    Raises:
        ValueError: In one sentence, why neither policy works here, or what is wrong with the
            profile that was named.

    """
    # An explicit None is --kv-eviction-profile none.
    unwanted = config.profile is None and "profile" in config.model_fields_set
    refusal = "without a profile, as --kv-eviction-profile none asks"
    if not unwanted:
        try:
            found = _with_profile(vllm_config, config)
            _settled(vllm_config, config, found, uncalibrated or "")
            _warn_of_budget(vllm_config, config, found)
            return found
        except ValueError as error:
            if config.profile not in (None, AUTO) or budget_loss(config.budget) is not None:
                raise
            refusal = uncalibrated or str(error).rstrip(".")
    without = {"policy": _unlearned(vllm_config), "profile": None}
    found = changed(config, without | budget_of(config, BUDGET))
    _settled(vllm_config, config, found, refusal)
    if not unwanted and is_parent(vllm_config):
        logger.warning(
            "KV eviction: auto uses %s with a budget of %s, because the model has no profile that "
            "this server can use: %s. Answers to questions that are asked after their context was "
            "evicted lose most by it (docs/quality.md). vllm-kvevict calibrate %s makes a profile.",
            found.policy,
            found.budget,
            refusal,
            vllm_config.model_config.model,
        )
    _warn_of_budget(vllm_config, config, found)
    return found


def is_parent(vllm_config: "VllmConfig") -> bool:
    """Return True in the one of several API servers that calibrates and reports."""
    parallel = vllm_config.parallel_config
    return parallel._api_process_count == 1 or parallel._api_process_rank == -1


def _warn_of_budget(
    vllm_config: "VllmConfig", asked: EvictionConfig, found: EvictionConfig
) -> None:
    usual = asked.budget if asked.prefill_interval else BUDGET
    if "budget" in asked.model_fields_set or found.budget == usual or not is_parent(vllm_config):
        return
    reason = f"--kv-eviction-max-budget is {asked.max_budget}"
    if isinstance(found.profile, Profile) and found.budget != asked.max_budget:
        reason = (
            f"the profile was measured at {found.budget}"
            if found.budget == found.profile.budget
            else f"the profile bounds the loss of answers by {LOSS} nats per token there"
        )
    logger.warning(
        "KV eviction: the budget is %s instead of %s, because %s; --kv-eviction-budget sets "
        "another.",
        found.budget,
        usual,
        reason,
    )


def _with_profile(vllm_config: "VllmConfig", config: EvictionConfig) -> EvictionConfig:
    profile = load(AUTO if config.profile is None else config.profile, vllm_config)
    policy = _unlearned(vllm_config) if profile.probe is None else WITH_PROFILE
    budget: dict[str, Any] = {}
    if (loss := budget_loss(config.budget)) is not None:
        budget = {"budget": memory_for(config, profile, loss)}
    elif "budget" not in config.model_fields_set:
        window = config.options.probe_window == "auto"
        has_losses = not config.prefill_interval and losses(profile, window)
        share = memory_for(config, profile, LOSS) if has_losses else profile.budget
        budget = budget_of(config, share)
    return changed(config, {"policy": policy, "profile": profile} | budget)


def _unlearned(vllm_config: "VllmConfig") -> str:
    return LATENT if vllm_config.model_config.use_mla else WITHOUT_PROFILE


def budget_of(config: EvictionConfig, recommended: int | str) -> dict[str, Any]:
    """The budget that goes with a policy; nothing where one was set."""
    if "budget" in config.model_fields_set:
        return {}
    budget, cap = config.budget if config.prefill_interval else recommended, config.max_budget
    if cap is not None:
        try:
            check_cap(budget, cap)
        except ValueError:
            budget = cap
    return {"budget": budget}


def changed(config: EvictionConfig, changes: dict[str, Any]) -> EvictionConfig:
    """The configuration with ``changes`` in what was set, checked anew."""
    value = config.model_dump(mode="json", exclude_unset=True) | changes
    found = EvictionConfig.parse(value)
    assert found is not None
    return found


def _settled(
    vllm_config: "VllmConfig", asked: EvictionConfig, found: EvictionConfig, refusal: str = ""
) -> None:
    check(vllm_config, found)
    where = asked.profile if isinstance(asked.profile, str) else AUTO
    profile = "" if found.profile is None else f" --kv-eviction-profile {where}"
    logger.info(
        "KV eviction auto is --kv-eviction %s --kv-eviction-budget %s%s here%s.",
        found.policy,
        found.budget,
        profile,
        f" ({refusal})" if refusal else "",
    )
