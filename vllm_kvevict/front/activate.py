"""Eviction in a finished ``VllmConfig``: our worker and our scheduler in the place of vLLM's."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvevict.attention.choice import arrange
from vllm_kvevict.front import admission
from vllm_kvevict.front.shares import load
from vllm_kvevict.front.support import check
from vllm_kvevict.metrics import logger as stat_logger
from vllm_kvevict.policies.needs import ring_slots
from vllm_kvevict.schedule.layers import padding
from vllm_kvevict.settings.config import KEY, EvictionConfig
from vllm_kvevict.settings.memory import evictable_layers, ring_bytes
from vllm_kvevict.settings.shares import LayerShares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from vllm_kvevict.schedule.timeline import Timeline

logger = init_logger("vllm.kv_eviction.activate")

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvevict.worker.cpu.EvictingCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvevict.worker.gpu.EvictingWorker",
}
SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
EVICTING_SCHEDULER = "vllm_kvevict.engine.scheduler.EvictingScheduler"
EVICTING_ASYNC_SCHEDULER = "vllm_kvevict.engine.scheduler.EvictingAsyncScheduler"

SHORTFALL = 0.1
"""Share of the budget that may be lost to whole blocks before a warning."""


def activate(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Switch eviction on in ``vllm_config``. Idempotent.

    Every process reads the normalised settings from ``additional_config["kv_eviction"]``.

    Args:
        vllm_config: As ``EngineArgs.create_engine_config`` built it; changed in place.
        config: The validated settings.

    Raises:
        ValueError: In one sentence, what about the model or the configuration does not work
            with eviction.

    """
    check(vllm_config, config)
    if config.layers is not None:
        config = config.model_copy(update={"layers": load(config.layers, vllm_config)})
    arrange(vllm_config, config)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    worker_cls = _worker(parallel.worker_cls)
    scheduler_cls = _scheduler(scheduler.scheduler_cls, bool(scheduler.async_scheduling))
    vllm_config.additional_config[KEY] = config.model_dump(mode="json")
    parallel.worker_cls = worker_cls
    scheduler.scheduler_cls = scheduler_cls
    admission.install()
    stat_logger.install()
    # Of several API servers only the parent speaks.
    if parallel._api_process_count == 1 or parallel._api_process_rank == -1:
        _report(vllm_config, config)


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


def _scheduler(scheduler_cls: Any, asynchronous: bool) -> str:
    name = scheduler_cls
    if isinstance(scheduler_cls, type):
        name = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    ours = (EVICTING_SCHEDULER, EVICTING_ASYNC_SCHEDULER)
    if name is not None and name not in SCHEDULERS + ours:
        raise ValueError(
            f"KV eviction does not support the scheduler class {name!r}, because it extends "
            f"vLLM's own ({', '.join(SCHEDULERS)}); remove --scheduler-cls or serve without "
            "--kv-eviction."
        )
    return EVICTING_ASYNC_SCHEDULER if asynchronous else EVICTING_SCHEDULER


def _report(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    block_size = vllm_config.cache_config.block_size
    longest = vllm_config.model_config.max_model_len
    timeline = config.timeline(block_size)
    how_often = f"every {timeline.stride} decode steps" if timeline.stride else "after prefill only"
    blocks, tokens = "depends on the prompt", config.budget_tokens
    if config.keeps_by_layer(config.policy):
        blocks = "by layer"
    elif tokens is not None:
        blocks = f"{timeline.store_blocks(0)} per request"
    rings = ring_slots(vllm_config, config) * ring_bytes(vllm_config, config)
    logger.info(
        "KV eviction is on: policy %s, budget %s%s, window %d tokens, interval %d (evicts %s), "
        "block size %d tokens, store blocks: %s, at most %.1f MiB of observation rings on a rank.",
        config.policy,
        config.budget,
        " of the prompt" if tokens is None else " tokens",
        config.window,
        config.interval,
        how_often,
        block_size,
        blocks,
        rings / 2**20,
    )
    if config.has_groups:
        _report_groups(vllm_config, config)
    if config.allow or config.max_budget is not None:
        logger.info(
            "KV eviction: requests may choose among %s, with a budget of %s.",
            ", ".join(config.choices),
            "any size" if config.max_budget is None else f"at most {config.max_budget}",
        )
    if tokens is None:
        return
    kept, advice = _kept(vllm_config, config)
    if abs(kept - tokens) > SHORTFALL * tokens:
        logger.warning(
            "KV eviction keeps %d tokens per KV head instead of the budget of %d: a store is "
            "made of whole blocks of %d tokens, at least one, beside the window of %d. %s",
            kept,
            tokens,
            block_size,
            config.window,
            advice,
        )
    if not timeline.evictable(longest, timeline.store_blocks(0), 0):
        logger.warning(
            "KV eviction will never run: at a budget of %d tokens nothing is evicted up to the "
            "longest sequence of %d tokens (--max-model-len).",
            tokens,
            longest,
        )


def _kept(vllm_config: "VllmConfig", config: EvictionConfig) -> tuple[int, str]:
    """Tokens that whole blocks keep per KV head, on average over layers, and what would fit."""
    block_size = vllm_config.cache_config.block_size
    if not config.keeps_by_layer(config.policy):
        kept = config.timeline(block_size).store_blocks(0) * block_size + config.window
        return kept, f"A budget of {kept}, or a smaller --block-size, fits."
    rules = config.timelines(block_size, evictable_layers(vllm_config))
    longest = vllm_config.model_config.max_model_len
    blocks = sum(rule.store_blocks(longest) for rule in rules)
    kept = blocks * block_size // len(rules) + config.window
    return kept, "A smaller --block-size comes nearer."


def _report_groups(vllm_config: "VllmConfig", config: EvictionConfig) -> None:
    """Say which layers share a budget, what each keeps, and what uneven groups cost."""
    layers = evictable_layers(vllm_config)
    longest = vllm_config.model_config.max_model_len
    timelines = config.timelines(vllm_config.cache_config.block_size, layers)
    groups = sorted(set(timelines), key=lambda rule: rule.share.group if rule.share else 0)
    sizes = [timelines.count(group) for group in groups]
    logger.info(
        "KV eviction: layers in groups of %s, %s, with stores of %s blocks in a sequence of %d "
        "tokens.",
        ", ".join(map(str, sizes)),
        _shares(config, groups),
        ", ".join(str(group.store_blocks(longest)) for group in groups),
        longest,
    )
    _report_least(config, groups)
    missing = padding(sizes)
    # Among layers that do not evict vLLM makes other groups, and says itself what they waste.
    if missing and layers == vllm_config.model_config.get_total_num_hidden_layers():
        logger.warning(
            "KV eviction: groups of %s layers leave %.1f%% of the KV cache unused; a "
            "--kv-eviction-groups that divides the %d layers would leave none.",
            ", ".join(map(str, sizes)),
            100 * missing / (layers + missing),
            layers,
        )


def _shares(config: EvictionConfig, groups: "Sequence[Timeline]") -> str:
    if not isinstance(config.layers, LayerShares):
        return "shallow to deep"
    shares = ", ".join(f"{rule.share.value:.2f}" for rule in groups if rule.share)
    return f"with shares of {shares} as {config.layers.policy} measured them"


def _report_least(config: EvictionConfig, groups: "Sequence[Timeline]") -> None:
    """Say where groups keep more than their share, because a store has a block at least."""
    if not config.keeps_by_layer(config.policy):
        return
    block_size = groups[0].block_size
    least = min(rule.share.value for rule in groups if rule.share)
    # What the mean must be beside the window for the smallest share to come to a block.
    enough = block_size / least + config.window
    if config.budget_share is not None:
        logger.info(
            "KV eviction: in prompts of less than %d tokens some layers keep a block of %d tokens "
            "and not less, their share; the other layers keep as much less.",
            enough / config.budget_share,
            block_size,
        )
    elif config.budget_tokens is not None and config.budget_tokens < enough:
        lifted = sum(
            rule.share.value * (config.budget_tokens - config.window) < block_size
            for rule in groups
            if rule.share
        )
        logger.info(
            "KV eviction: at a budget of %d tokens %d of %d groups keep a block of %d tokens and "
            "not less, their share; the other layers keep as much less.",
            config.budget_tokens,
            lifted,
            len(groups),
            block_size,
        )
