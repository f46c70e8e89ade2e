"""``--kv-eviction-profile measure``: calibrate runs where ``auto`` would find no profile."""

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvevict.config.budget import budget_loss
from vllm_kvevict.config.names import AUTO, CONFIG_KEY, MEASURE
from vllm_kvevict.serving.profile import FLAG, find
from vllm_kvevict.serving.recommend import BUDGET, WITH_PROFILE, budget_of, changed
from vllm_kvevict.serving.support import check

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

logger = init_logger("vllm.kv_eviction.measure")

FIELDS = (
    "tokenizer tokenizer_mode tokenizer_revision trust_remote_code revision code_revision "
    "hf_config_path hf_overrides config_format load_format download_dir dtype quantization "
    "tensor_parallel_size distributed_executor_backend gpu_memory_utilization"
).split()
"""Fields of vLLM's ``EngineArgs`` that say which model it is, and where it fits."""


def measured(
    engine_args: Any, vllm_config: "VllmConfig", config: "EvictionConfig"
) -> "EvictionConfig":
    """Return the configuration with ``auto`` instead of ``measure``, and a profile that it finds.

    Nothing is measured where the server could not use it; ``auto`` then says why.

    Args:
        engine_args: vLLM's ``EngineArgs``, from which ``vllm_config`` was built.
        vllm_config: As vLLM built it.
        config: The settings; those without ``measure`` are returned as they are.

    Raises:
        ValueError: In one sentence, what went wrong, and the command that measures by hand.

    """
    if config.profile != MEASURE:
        return config
    config = changed(config, {"profile": AUTO})
    if find(vllm_config) is not None or not _is_usable(vllm_config, config):
        return config
    words = [str(engine_args.model), *flags(engine_args)]
    by_hand = f"vllm-kvevict calibrate {shlex.join(words)}"
    logger.info("KV eviction: no profile of this model yet, so it is measured now: %s", by_hand)
    problem = _run([sys.executable, "-m", "vllm_kvevict.calibrate", *words])
    if problem is None and find(vllm_config) is None:
        problem = "what it wrote is another model's"
    if problem is not None:
        raise ValueError(f"{FLAG} {MEASURE}: {problem}; measure by hand with {by_hand}")
    return config


def flags(engine_args: Any) -> list[str]:
    """Return the flags with which calibrate measures the model of ``engine_args``."""
    given = {name: getattr(engine_args, name) for name in FIELDS}
    others = {k: v for k, v in (engine_args.additional_config or {}).items() if k != CONFIG_KEY}
    found = []
    for name, value in (given | {"additional_config": others}).items():
        if not value or callable(value) or value == getattr(type(engine_args), name, None):
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return found


def _is_usable(vllm_config: "VllmConfig", config: "EvictionConfig") -> bool:
    try:
        if budget_loss(config.budget) is not None:
            # It stands for a share, which the profile will say.
            config = changed(config, {"budget": BUDGET})
        if config.policy == AUTO:
            config = changed(config, {"policy": WITH_PROFILE} | budget_of(config, BUDGET))
        check(vllm_config, config)
    except ValueError:
        return False
    return True


def _run(command: list[str]) -> str | None:
    """Run a command and log its output. Return what was wrong, or None."""
    last = "it said nothing"
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            # A progress bar ends its lines with carriage returns, which read as line ends.
            for line in filter(None, map(str.strip, process.stdout)):
                logger.info("calibrate: %s", line)
                last = line
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return None
    return f"calibrate ended with status {process.returncode} ({last.removeprefix('error: ')})"
