"""Budgets that are given as what answers may lose: the share for it, from the model's profile."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.config.budget import budget_loss
from vllm_kvevict.config.names import LEARNED
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving.profile import load

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

logger = init_logger("vllm.kv_eviction.loss")

FLAG = "KV eviction: --kv-eviction-budget"
WHOLE = "100%"


def losses(profile: Profile, window: bool) -> dict[str, float]:
    """Return upper 95% bounds of what answers lose, by share, smallest first; empty if unknown.

    Args:
        profile: The model's; the question is not known at its evictions.
        window: True for evictions that are joined with a recorded window, as at the end of a
            prompt; False for those by keys alone, as at the end of a context that a request names.

    """
    rows = profile.quality.get("joined" if window else "keys")
    if profile.probe is None or not isinstance(rows, dict):
        return {}
    found = {
        f"{float(share[:-1]):g}%": float(row["kl"][2])
        for share, row in rows.items()
        if share.endswith("%") and isinstance(row, dict) and len(row.get("kl", ())) == 3
    }
    return dict(sorted(found.items(), key=lambda pair: float(pair[0][:-1])))


def share_for(config: "EvictionConfig", profile: Profile, loss: float) -> str:
    """Return the smallest measured share at which answers lose less, with 97.5% confidence.

    Raises:
        ValueError: In one sentence: the profile does not say what answers lose.

    """
    window = config.options.probe_window == "auto"
    bounds = losses(profile, window)
    if not bounds:
        raise ValueError(
            f"{FLAG} loss={loss:g}: the profile does not say what answers lose; make a new one "
            "with vllm-kvevict calibrate MODEL, or give tokens or a share"
        )
    chosen = next((share for share, bound in bounds.items() if bound < loss), WHOLE)
    listed = ", ".join(f"{share} {bound:.3f}" for share, bound in bounds.items())
    if chosen == WHOLE:
        logger.warning(
            "KV eviction evicts nothing: answers may lose %g nats per token or more at every "
            "measured share (upper 95%% bounds of the profile: %s). To evict, set "
            "--kv-eviction-budget to a share, such as 25%%.",
            loss,
            listed,
        )
        return chosen
    logger.info(
        "KV eviction keeps %s, the smallest of the measured shares at which answers lose less than "
        "%g nats per token (upper 95%% bounds of the profile: %s).",
        chosen,
        loss,
        listed,
    )
    named = losses(profile, window=False).get(chosen, 0.0)
    if window and named >= loss:
        logger.info(
            "KV eviction: at the end of a context that a request names (kv_eviction_at), answers "
            "may lose %.3f nats per token at %s, which is more than %g.",
            named,
            chosen,
            loss,
        )
    return chosen


def memory_for(config: "EvictionConfig", profile: Profile, loss: float) -> str:
    """Return the share of the memory that holds the tokens of :func:`share_for`.

    A budget in percent is a share of the memory, and the profile measured tokens in the cache's
    type. Stores in few bits hold as many tokens in less. What quantising them loses is not in the
    profile. If answers lose too much at every measured share, nothing is evicted.

    Raises:
        ValueError: As :func:`share_for`.

    """
    share = share_for(config, profile, loss)
    if share == WHOLE or config.token_format.as_cached:
        return share
    block = 16
    percent = float(share[:-1]) * block / config.token_format.page_tokens(block)
    found = f"{percent:.3g}%"
    logger.info(
        "KV eviction: stores of --kv-eviction-store-dtype %s hold %s of the tokens in %s of the "
        "memory; the profile does not say what these bits lose.",
        config.store_dtype,
        share,
        found,
    )
    return found


def resolved(vllm_config: "VllmConfig", config: "EvictionConfig") -> "EvictionConfig":
    """Return the configuration with a share instead of a loss.

    Raises:
        ValueError: In one sentence: there is no profile, or it does not say what answers lose, or
            the policy is not the one that it measured.

    """
    loss = budget_loss(config.budget)
    if loss is None:
        return config
    if config.policy not in LEARNED or config.profile is None:
        raise ValueError(
            f"{FLAG} loss={loss:g} needs --kv-eviction probe (or auto) and --kv-eviction-profile, "
            "which says what answers lose by budget"
        )
    profile = load(config.profile, vllm_config)
    share = memory_for(config, profile, loss)
    value = config.model_dump(mode="json", exclude_unset=True)
    found = type(config).parse(value | {"budget": share})
    assert found is not None
    return found
