"""What a server with these flags would run by, without its weights and without calibrating it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import AUTO, CALIBRATE, CONFIG_KEY
from vllm_kvevict.config.profile import ProbeFile, Profile
from vllm_kvevict.serving.activate import activate, check_statistics
from vllm_kvevict.serving.calibrate import cannot_calibrate, failed_before, is_usable
from vllm_kvevict.serving.few_bits import on_a_gpu, refused_on_gpus
from vllm_kvevict.serving.identity import Match, identity
from vllm_kvevict.serving.profile import find
from vllm_kvevict.serving.recommend import BUDGET, WITH_PROFILE, changed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CALIBRATED_FIRST = (
    "the model has no profile of its own on this machine, so the server calibrates it at its first "
    "start. "
    f"This is a plan for {WITH_PROFILE} with even shares and, without --kv-eviction-budget, "
    f"{BUDGET}; the profile may choose other shares and another budget. A large model is not "
    "calibrated within --kv-eviction-calibrate-seconds: do it before. --kv-eviction-profile none "
    "plans what the server runs otherwise"
)


def activated(
    engine_args: Any, vllm_config: "VllmConfig", config: EvictionConfig
) -> tuple[str, ...]:
    """Switch eviction on in ``vllm_config`` as a server does, but calibrate and download nothing.

    Args:
        engine_args: vLLM's ``EngineArgs``, from which ``vllm_config`` was built.
        vllm_config: vLLM's own; changed in place.
        config: The settings.

    Returns:
        What the server would warn of, and what is assumed here.

    Raises:
        ValueError: As :func:`~vllm_kvevict.serving.activate.activate`.

    """
    check_statistics(config, engine_args.disable_log_stats)
    notes: list[str] = []
    uncalibrated = None
    insists = config.profile == CALIBRATE
    if insists:
        config = changed(config, {"profile": AUTO})
    implicit = config.policy == AUTO and "profile" not in config.model_fields_set
    if (
        (insists or implicit)
        and is_usable(vllm_config, config)
        and _calibrates(vllm_config, insists)
    ):
        uncalibrated = cannot_calibrate(vllm_config)
        if uncalibrated is None and implicit:
            uncalibrated = failed_before(vllm_config, config)
        if uncalibrated is None:
            config = config.model_copy(update={"profile": _unknown(vllm_config)})
            notes.append(CALIBRATED_FIRST)
    with _warnings() as warned:
        activate(vllm_config, config, uncalibrated)
    if not on_a_gpu():
        # A plan is often made on another machine than the one that serves.
        for refusal in refused_on_gpus(vllm_config, config):
            notes.append(f"this is a plan for CPUs. On GPUs {refusal.sentence().rstrip('.')}")
    return *notes, *warned


def _calibrates(vllm_config: "VllmConfig", insists: bool) -> bool:
    """Return whether a server looks for another profile than it has: it has none, or one of a
    related model, which does not keep it from calibrating unless a profile was asked for by flag.

    Where no weights can be read, a profile may be the model's own.
    """
    found = find(vllm_config)
    if found is None:
        return True
    known = identity(vllm_config).weights is not None
    return known and not insists and found.match is not Match.SAME


def _unknown(vllm_config: "VllmConfig") -> Profile:
    """A profile that says nothing about layers."""
    mine = identity(vllm_config)
    return Profile(
        model=mine,
        policy=WITH_PROFILE,
        budget=BUDGET,
        layers=(1.0,) * mine.layers,
        probe=ProbeFile(file="of the first start", sha256="unknown"),
    )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Warnings of this package, whatever VLLM_LOGGING_LEVEL is."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage().removeprefix("KV eviction: ").rstrip("."))

    logger, handler = logging.getLogger(f"vllm.{CONFIG_KEY}"), Keep(logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
