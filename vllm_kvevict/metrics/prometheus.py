"""The Prometheus metrics of eviction."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

import vllm_kvevict
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.metrics.audited import AuditMetrics
from vllm_kvevict.metrics.report import Report

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

PREFIX = "vllm_kvevict:"
"""The prefix is not ``vllm:``, because vLLM unregisters every collector of that name when an engine
starts."""

REASONS = ("prefill", "decode")
LABELS = ("model_name", "engine")
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
SPREADS = (1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 16)

COUNTERS = {
    "tokens_evicted": (
        "evicted_tokens",
        "Cached tokens evicted, per KV head (average over heads), once per KV-cache group.",
    ),
    "tokens_protected": (
        "protected_tokens",
        "First tokens that evicted requests protect in every head, once per request.",
    ),
    "blocks_freed": ("freed_blocks", "Blocks returned to the pool by evictions."),
    "store_blocks_allocated": ("store_blocks", "Blocks taken from the pool for kept tokens."),
    "evictions_in_place": (
        "in_place_evictions",
        "Evictions into blocks of their own request, once per KV-cache group.",
    ),
    "skipped_shared": (
        "skipped_evictions",
        "Evictions deferred because other requests hold the blocks that they would free.",
    ),
    "prefix_hits_capped": (
        "capped_prefix_hits",
        "Prefix-cache hits shortened so that the observation window is computed.",
    ),
    "stores_published": (
        "published_stores",
        "Stores of evictions at a point that other requests may take.",
    ),
    "stores_reused": (
        "reused_stores",
        "Admissions of requests that took the store of another request's eviction.",
    ),
    "tokens_reused": ("reused_tokens", "Tokens that these requests did not compute."),
    "evictions_unscored": (
        "unscored_evictions",
        "Evictions with a policy that failed, once per KV-cache group; the most recent tokens were "
        "kept.",
    ),
    "evictions_pressure": (
        "pressure_evictions",
        "Evictions of requests that evict under memory pressure only.",
    ),
    "stores_saved": (
        "saved_stores",
        "Published stores that were copied to host memory or to files.",
    ),
    "files_refused": ("refused_store_files", "Invalid files of stores."),
    "tokens_audited": (
        "audited_tokens",
        "Tokens computed again to measure the loss of evictions; not in any request's usage.",
    ),
    "audits_dropped": (
        "dropped_audits",
        "Evictions of audited requests without a replay, because other requests took precedence.",
    ),
    "requests_whole": (
        "whole_requests",
        "Requests that ended, never evicted and over no store of another.",
    ),
    "requests_evicted": (
        "evicted_requests",
        "Requests that ended and were evicted, or began with a store.",
    ),
}
"""Name and description of a metric, by field of a report."""

RESTORED = {
    "stores_restored": ("restored_stores", "Stores restored into the KV cache."),
    "tokens_restored": ("restored_tokens", "Tokens of the contexts of these stores."),
    "bytes_restored": ("restored_bytes", "Bytes of these stores, on all ranks."),
    "seconds_restored": ("restored_seconds", "Seconds of reading and copying these stores."),
}
"""As :data:`COUNTERS`, by the tier that a store was restored from. Keys are fields without
``_TIER``."""

TIERS = ("memory", "file")

CAUSES = ("blocks", "ring", "turn")
"""Causes of a postponed eviction: no blocks in the pool, no ring slot, or no turn in the batch."""

MARKS = ("low", "high")
"""Watermarks at which eviction under pressure begins and ends."""

_registered: list[Any] = []
"""Collectors of this process. An engine that starts later in the process replaces them."""


class EvictionMetrics:
    """All metrics of one front end, with children for each of its engines.

    Args:
        model_name: Value of vLLM's label of that name.
        engines: Indexes of the engines that report here.
        config: Configuration of eviction.
        block_size: Tokens in a block.
        longest: Maximum length of a sequence in tokens.
        kinds: Logger with the metric classes to use: vLLM's, or the one that replaces it under Ray.

    """

    def __init__(
        self,
        model_name: Any,
        engines: Sequence[int],
        config: EvictionConfig,
        block_size: int,
        longest: int,
        kinds: "type[PrometheusStatLogger]",
    ) -> None:
        while _registered:
            REGISTRY.unregister(_registered.pop())
        self._kinds = kinds
        labels = {engine: (model_name, str(engine)) for engine in engines}

        def children(metric: Any, *more: str) -> dict[int, Any]:
            return {engine: metric.labels(*own, *more) for engine, own in labels.items()}

        evictions = self._make(
            "counter", "evictions", "Evictions of a request.", "policy", "reason"
        )
        self._evictions = {
            (policy, reason): children(evictions, policy, reason)
            for policy in config.policies
            for reason in REASONS
        }
        self._counters = {
            name: children(self._make("counter", metric, text))
            for name, (metric, text) in COUNTERS.items()
        }
        postponed = self._make(
            "counter",
            "postponed_evictions",
            "Steps in which an eviction was due but had to wait, by reason.",
            "reason",
        )
        self._postponed = {cause: children(postponed, cause) for cause in CAUSES}
        self._restored: dict[str, dict[int, Any]] = {}
        for name, (metric, text) in RESTORED.items():
            counter = self._make("counter", metric, text, "tier")
            self._restored |= {f"{name}_{tier}": children(counter, tier) for tier in TIERS}
        histograms = {
            "seconds": ("eviction_seconds", "Seconds of one eviction on a worker.", SECONDS),
            "kept_share": (
                "request_kept_share",
                "Share of its tokens that a finished request held in the cache at its end.",
                SHARES,
            ),
            "head_spread": (
                "head_budget_spread",
                "Pages of the largest KV head over the mean of its layer, of sampled evictions.",
                SPREADS,
            ),
        }
        self._histograms = {
            name: children(self._make("histogram", metric, text, buckets=buckets))
            for name, (metric, text, buckets) in histograms.items()
        }
        self._audits = AuditMetrics(self._make, labels) if config.audits else None
        self._saved = children(
            self._make(
                "gauge",
                "blocks_saved",
                "Blocks that evictions of running requests returned, less those that they took.",
            )
        )
        self._idle = children(
            self._make("gauge", "idle_stores", "Published stores that no request holds.")
        )
        self._store_bytes = children(
            self._make("gauge", "store_memory_bytes", "Host memory that holds stores.")
        )
        marks = self._make(
            "gauge",
            "mark_blocks",
            "Free blocks at which eviction under pressure begins or ends.",
            "mark",
        )
        self._marks = {mark: children(marks, mark) for mark in MARKS}
        self._pressing = children(
            self._make("gauge", "pressing", "1 while eviction under pressure runs.")
        )
        shortest = config.rule(block_size).shortest_evicted(longest)
        evicts_from = self._make(
            "gauge", "evicts_from_tokens", "The shortest prompt that is evicted at its end."
        )
        for gauge in children(evicts_from).values():
            gauge.set(math.inf if shortest is None else shortest)
        settings = info(config, block_size)
        about = self._make("gauge", "config_info", "Settings of KV eviction.", *settings)
        for gauge in children(about, *settings.values()).values():
            gauge.set(1)

    def _make(self, kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
        if kind == "gauge":
            options["multiprocess_mode"] = "mostrecent"
        metric = getattr(self._kinds, f"_{kind}_cls")(
            name=PREFIX + name, documentation=text, labelnames=[*LABELS, *labels], **options
        )
        if isinstance(metric, MetricWrapperBase):
            _registered.append(metric)
        return metric

    def record(self, report: Report, engine: int) -> None:
        """Add the report of an engine."""
        for policy, counts in report.evictions.items():
            for reason, count in zip(REASONS, counts, strict=True):
                if count:
                    self._evictions[policy, reason][engine].inc(count)
        for name, counter in (self._counters | self._restored).items():
            if count := getattr(report, name):
                counter[engine].inc(count)
        for cause, waited in self._postponed.items():
            if count := getattr(report, f"postponed_{cause}"):
                waited[engine].inc(count)
        for name, histogram in self._histograms.items():
            for value in getattr(report, name):
                histogram[engine].observe(value)
        if self._audits is not None:
            self._audits.record(report.audits, engine)
        self._saved[engine].set(report.blocks_saved)
        self._idle[engine].set(report.idle_stores)
        self._store_bytes[engine].set(report.store_bytes)
        for mark, gauge in self._marks.items():
            gauge[engine].set(getattr(report, f"mark_{mark}"))
        self._pressing[engine].set(int(report.pressing))


def info(config: EvictionConfig, block_size: int) -> dict[str, str]:
    """Return the labels of the configuration: its fields, the block size, and the package version.

    A profile is represented by a digest, the first 16 digits of SHA-256 over its JSON, without the
    place of its file.
    """

    def text(value: Any) -> str:
        if isinstance(value, dict):
            # Some metric stores drop labels of several kilobytes.
            return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        return "" if value is None else str(value)

    values = config.model_dump(mode="json", exclude={"options"})
    values |= config.options.model_dump(mode="json")
    if isinstance(profile := values["profile"], dict) and profile["probe"] is not None:
        values["profile"] = profile | {"probe": profile["probe"]["sha256"]}
    # Options of a policy of another package have its name, which may contain dashes.
    settings = {name.replace("-", "_"): text(value) for name, value in values.items()}
    return settings | {"block_size": str(block_size), "version": vllm_kvevict.__version__}
