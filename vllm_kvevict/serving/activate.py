"""Switches eviction on in a finished ``VllmConfig`` with our worker and our scheduler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from vllm_kvevict.attention.choice import arrange
from vllm_kvevict.compat.versions import untested
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import evictable_layers, ring_bytes
from vllm_kvevict.config.names import AUTO, CONFIG_KEY
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.config.store_tiers import parse_folder
from vllm_kvevict.metrics import logger as stat_logger
from vllm_kvevict.policies.requirements import ring_slots, sustained
from vllm_kvevict.serving import admission
from vllm_kvevict.serving.capacity import check_blocks
from vllm_kvevict.serving.connectors import serve_connector, with_one_group
from vllm_kvevict.serving.few_bits import with_store_dtype
from vllm_kvevict.serving.loss import resolved
from vllm_kvevict.serving.offload import without_prefix_cache
from vllm_kvevict.serving.profile import check_learned, load, warn_of_few_lessons, warn_of_related
from vllm_kvevict.serving.recommend import is_parent, recommended
from vllm_kvevict.serving.support import check
from vllm_kvevict.stores.folder import check_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = init_logger("vllm.kv_eviction.activate")

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvevict.worker.cpu.EvictingCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvevict.worker.gpu.EvictingWorker",
}
SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
OURS = {
    # By whether scheduling is asynchronous.
    False: "vllm_kvevict.engine.scheduler.EvictingScheduler",
    True: "vllm_kvevict.engine.scheduler.EvictingAsyncScheduler",
}


def activate(
    vllm_config: "VllmConfig", config: EvictionConfig, uncalibrated: str | None = None
) -> None:
    """Switch eviction on in ``vllm_config``. Idempotent.

    Every process reads the normalised settings from ``additional_config["kv_eviction"]``.

    Args:
        vllm_config: As ``EngineArgs.create_engine_config`` built it; changed in place.
        config: The validated settings.
        uncalibrated: Why the model could not be calibrated; None if it was not tried.

    Raises:
        ValueError: In one sentence, what about the model or the configuration does not work
            with eviction.

    """
    config = with_store_dtype(vllm_config, config)
    if config.policy == AUTO:
        config = recommended(vllm_config, config, uncalibrated)
    config = with_one_group(vllm_config, resolved(vllm_config, config))
    check(vllm_config, config)
    if config.profile is not None:
        config = config.model_copy(update={"profile": load(config.profile, vllm_config)})
    check_learned(config, vllm_config.model_config.model)
    arrange(vllm_config, config)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    worker_cls = _worker(parallel.worker_cls)
    if config.has_tiers and parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "KV eviction: --kv-eviction-store-memory and --kv-eviction-store-path keep stores of "
            "layers that one process has; set --pipeline-parallel-size to 1 or remove these."
        )
    launched = parallel.distributed_executor_backend == "external_launcher"
    if config.has_tiers and launched and parallel.world_size > 1:
        raise ValueError(
            "KV eviction does not support --kv-eviction-store-memory and --kv-eviction-store-path "
            "with the executor external_launcher on several ranks, because each rank schedules for "
            "itself and files arrive at different times; remove these flags."
        )
    if config.has_tiers and not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "KV eviction: --kv-eviction-store-memory and --kv-eviction-store-path keep stores that "
            f"requests share through the prefix cache{without_prefix_cache(vllm_config)} these."
        )
    if config.store_path is not None:
        check_folder(Path(parse_folder(config.store_path)[0]))
    check_audit(vllm_config, config)
    check_blocks(vllm_config, config)
    serve_connector(vllm_config, config)
    scheduler_cls = _scheduler(scheduler.scheduler_cls, OURS[bool(scheduler.async_scheduling)])
    vllm_config.additional_config[CONFIG_KEY] = config.model_dump(mode="json")
    parallel.worker_cls = worker_cls
    scheduler.scheduler_cls = scheduler_cls
    admission.install()
    stat_logger.install()
    # Of several API servers only the parent speaks.
    if is_parent(vllm_config):
        _report(vllm_config, config)


def check_statistics(config: EvictionConfig, disabled: bool) -> None:
    """Refuse audits where vLLM's statistics, which carry them, are ``disabled``.

    Raises:
        ValueError: In one sentence, what to do.

    """
    if config.audits and disabled:
        raise ValueError(
            "KV eviction: --kv-eviction-audit reports through vLLM's statistics; remove "
            "--disable-log-stats (LLM(disable_log_stats=False) in Python) or it."
        )


def check_audit(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Refuse audits where they could not run.

    Raises:
        ValueError: In one sentence, why.

    """
    if not config.audits:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "KV eviction: --kv-eviction-audit replays tokens over blocks that requests share "
            f"through the prefix cache{without_prefix_cache(vllm_config)} it."
        )
    if vllm_config.lora_config is not None:
        raise ValueError(
            "KV eviction: --kv-eviction-audit compares logits of a step of its own, which adapters "
            "do not know; remove --enable-lora or it."
        )
    if evictable_layers(vllm_config) < vllm_config.model_config.get_total_num_hidden_layers():
        raise ValueError(
            "KV eviction: --kv-eviction-audit replays tokens over the blocks that evictions keep, "
            "but this model has layers that do not evict; remove it."
        )


def _worker(worker_cls: Any) -> str:
    if worker_cls in WORKERS.values():
        return worker_cls
    if isinstance(worker_cls, str) and worker_cls in WORKERS:
        return WORKERS[worker_cls]
    name = repr(worker_cls) if isinstance(worker_cls, str) else "a custom class"
    raise ValueError(
        f"KV eviction does not support the worker class {name}, because it extends vLLM's own "
        f"({', '.join(WORKERS)}); remove --worker-cls or serve without --kv-eviction."
    )


def _scheduler(scheduler_cls: Any, ours: str) -> str:
    name = scheduler_cls
    if isinstance(scheduler_cls, type):
        name = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    if name is not None and name not in (*SCHEDULERS, *OURS.values()):
        raise ValueError(
            f"KV eviction does not support the scheduler class {name!r}, because it extends "
            f"vLLM's own ({', '.join(SCHEDULERS)}); remove --scheduler-cls or serve without "
            "--kv-eviction."
        )
    return ours


def _report(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Say what is on; the engine core says what it comes to in blocks, when it has made them."""
    if warning := untested(vllm.__version__):
        logger.warning("%s.", warning)
    if isinstance(config.profile, Profile):
        warn_of_related(config.profile, vllm_config)
        warn_of_few_lessons(config.profile, vllm_config)
        if (file := config.profile.probe) is not None:
            logger.info("KV eviction: the profile is %s (SHA-256 %s).", file.file, file.sha256)
    slots = ring_slots(vllm_config, config)
    rings = slots * ring_bytes(vllm_config, config)
    most = sustained(slots, config.rule(vllm_config.cache_config.block_size))
    logger.info(
        "KV eviction is on: policy %s, budget %s%s, window %d tokens, interval %d, %.1f MiB of "
        "observation rings on a rank%s.",
        config.policy,
        config.budget,
        " tokens"
        if config.budget_tokens is not None
        else " of the tokens so far"
        if config.token_format.as_cached
        else " of the memory of the tokens so far",
        config.window,
        config.interval,
        rings / 2**20,
        f" ({slots} slots: {most} sequences evict at this interval, more less often; "
        "--kv-eviction-ring-memory sets their memory)"
        if most is not None and most < vllm_config.scheduler_config.max_num_seqs
        else "",
    )
    if config.when == "pressure":
        logger.info(
            "KV eviction under pressure only: it begins when %g%% of the blocks are free and ends "
            "at %g%%, each in addition to what running requests take until blocks are back.",
            100 * config.options.low_mark,
            100 * config.options.high_mark,
        )
    if config.allow or config.max_budget is not None:
        logger.info(
            "KV eviction: requests may choose among %s, with a budget of %s.",
            ", ".join(config.choices),
            "any size" if config.max_budget is None else f"at most {config.max_budget}",
        )
