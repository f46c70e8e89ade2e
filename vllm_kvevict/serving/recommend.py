"""Resolves ``--kv-eviction auto``: the best policy that this model and this server can run."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvevict.config.budget import budget_loss, check_cap
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.loss import losses, share_for
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


def recommended(vllm_config: "VllmConfig", config: EvictionConfig) -> EvictionConfig:
    """The configuration with a policy, and with the budget and the profile that go with it.

    What was set by hand stays. Without evictions inside prompts, which need a budget in tokens,
    the budget is the smallest at which answers lose less than :data:`LOSS` where the profile says
    what they lose, else the profile's, or :data:`BUDGET`; but not above the cap on those of
    requests.

    Args:
        vllm_config: As vLLM built it.
        config: The settings, of the policy ``auto``.

    Raises:
        ValueError: In one sentence, why neither policy works here, or what is wrong with the
            profile that was named.

    """
    refusal = ""
    try:
        return _settled(vllm_config, config, _with_profile(vllm_config, config))
    except ValueError as error:
        if config.profile not in (None, AUTO) or budget_loss(config.budget) is not None:
            raise
        refusal = str(error)
    without = {"policy": _unlearned(vllm_config), "profile": None}
    found = changed(config, without | budget_of(config, BUDGET))
    return _settled(vllm_config, config, found, refusal)


def _with_profile(vllm_config: "VllmConfig", config: EvictionConfig) -> EvictionConfig:
    profile = load(AUTO if config.profile is None else config.profile, vllm_config)
    policy = _unlearned(vllm_config) if profile.probe is None else WITH_PROFILE
    budget: dict[str, Any] = {}
    if (loss := budget_loss(config.budget)) is not None:
        budget = {"budget": share_for(config, profile, loss)}
    elif "budget" not in config.model_fields_set:
        window = config.options.probe_window == "auto"
        has_losses = not config.prefill_interval and losses(profile, window)
        share = share_for(config, profile, LOSS) if has_losses else profile.budget
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
) -> EvictionConfig:
    check(vllm_config, found)
    where = asked.profile if isinstance(asked.profile, str) else AUTO
    profile = "" if found.profile is None else f" --kv-eviction-profile {where}"
    logger.info(
        "KV eviction auto is --kv-eviction %s --kv-eviction-budget %s%s here%s.",
        found.policy,
        found.budget,
        profile,
        f" ({refusal.rstrip('.')})" if refusal else "",
    )
    return found
