"""A stat logger of vLLM that passes an engine's reports to Prometheus and writes the periodic
line."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger, StatLoggerManager

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.metrics.interval import Interval
from vllm_kvevict.metrics.prometheus import EvictionMetrics
from vllm_kvevict.metrics.report import detach

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_eviction.metrics")

_WRAPPED = "_kv_eviction_wrapped"


class EvictionStatLogger(AggregateStatLoggerBase):
    """Receives the reports of eviction in the front end.

    It must come before vLLM's own loggers, which expect a KV connector's statistics in the field
    that carries a report.

    Args:
        vllm_config: Configuration of the engines, with eviction enabled.
        engine_indexes: Engines that report here.

    """

    kinds: type[PrometheusStatLogger] = PrometheusStatLogger
    """Logger with the metric classes to use."""

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: Sequence[int] = (0,)) -> None:
        config = EvictionConfig.parse(vllm_config.additional_config.get(CONFIG_KEY))
        assert config is not None
        self.metrics = EvictionMetrics(
            vllm_config.model_config.served_model_name,
            engine_indexes,
            config,
            vllm_config.cache_config.block_size,
            vllm_config.model_config.max_model_len,
            self.kinds,
        )
        # One of several API servers receives only a part; the engine core logs its totals in that
        # case.
        self._logs = vllm_config.parallel_config._api_process_count == 1
        self._intervals = {engine: Interval() for engine in engine_indexes}

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *_: Any, engine_idx: int = 0, **__: Any
    ) -> None:
        """Remove the report from the statistics of a step, if there is one, and record it."""
        report = detach(scheduler_stats) if scheduler_stats is not None else None
        if report is not None:
            self.metrics.record(report, engine_idx)
            self._intervals[engine_idx].add(report)

    def log(self) -> None:
        """Write one line for every engine that evicted or postponed since vLLM's last line."""
        for engine, interval in self._intervals.items():
            if self._logs and interval:
                logger.info("Engine %03d: %s", engine, interval.line())
            self._intervals[engine] = Interval(saved=interval.saved)

    def log_engine_initialized(self) -> None:
        """Do nothing: eviction is reported at start-up."""


def install() -> None:
    """Add this stat logger to every manager of an engine with eviction. Idempotent.

    The entry point ``vllm.stat_logger_plugins`` is not used: vLLM loads it in every server of the
    machine, also without eviction, and it would override ``--disable-log-stats`` there; and ``LLM``
    does not load it.
    """
    original = StatLoggerManager.__init__
    if not hasattr(original, _WRAPPED):
        StatLoggerManager.__init__ = _wrap(original)


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(
        self: StatLoggerManager,
        vllm_config: "VllmConfig",
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        additional = vllm_config.additional_config
        if (
            isinstance(additional, dict)
            and EvictionConfig.parse(additional.get(CONFIG_KEY)) is not None
        ):
            others = custom_stat_loggers or []
            custom_stat_loggers = [_for(others), *others]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    setattr(__init__, _WRAPPED, True)
    return __init__


def _for(others: list[Any]) -> type[EvictionStatLogger]:
    """Return the stat logger class. If another logger replaces vLLM's metrics (Ray), it uses that
    logger's metric classes."""
    for other in others:
        if isinstance(other, type) and issubclass(other, PrometheusStatLogger):
            return type("EvictionStatLogger", (EvictionStatLogger,), {"kinds": other})
    return EvictionStatLogger
