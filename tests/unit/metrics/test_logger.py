"""What vLLM's managers of stat loggers do with reports, and what Prometheus then reads."""

import logging
import math
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import ModelIdentity, ProbeFile, Profile
from vllm_kvevict.metrics.logger import EvictionStatLogger
from vllm_kvevict.metrics.prometheus import info
from vllm_kvevict.metrics.report import STATS_KEY, Report

SETTINGS = dict(policy="ada-snapkv", budget="25%", allow="tova,none")


pytestmark = pytest.mark.usefixtures("unregistered")


def ours() -> list[str]:
    return [f.name for f in REGISTRY.collect() if f.name.startswith("vllm_kvevict")]


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    labels = dict(model_name="served", engine=str(engine)) | labels
    return REGISTRY.get_sample_value(f"vllm_kvevict:{name}", labels)


def send(manager: StatLoggerManager, report: Report, engine: int = 0) -> None:
    stats = SchedulerStats(kv_connector_stats={STATS_KEY: vars(report)})
    manager.record(stats, IterationStats(), engine_idx=engine)


def test_every_value_of_a_report(build):
    config = build(SETTINGS, served_model_name="served")
    manager = StatLoggerManager(config, [0, 1])
    manager.log_engine_initialized()
    assert value("evictions_total", policy="tova", reason="decode") == 0, "there from the start"
    report = Report(
        evictions={"ada-snapkv": [2, 1]},
        tokens_evicted=640, blocks_freed=50, store_blocks_allocated=20, postponed_ring=3,
        postponed_turn=2,
        prefix_hits_capped=4, kept_share=[0.25, 1.0], seconds=[0.003, 0.2, 0.004],
        head_spread=[1.3], blocks_saved=30, stores_published=6, stores_reused=11, tokens_reused=900,
        idle_stores=8, evictions_pressure=2, requests_whole=9, requests_evicted=6,
        mark_low=50, mark_high=90, pressing=True, stores_saved=3, files_refused=1,
        stores_restored_memory=2, tokens_restored_file=500, store_bytes=77,
        seconds_restored_file=0.25,
    )  # fmt: skip
    send(manager, report, engine=1)
    second = Report(evictions={"tova": [0, 5]}, blocks_saved=7, stores_reused=2, idle_stores=3)
    second.mark_high = 80
    send(manager, second, engine=1)
    assert value("pressure_evictions_total", 1) == 2
    assert value("whole_requests_total", 1) == 9 and value("evicted_requests_total", 1) == 6
    assert value("mark_blocks", 1, mark="low") == value("pressing", 1) == 0, "the last report's"
    assert value("evictions_total", 1, policy="ada-snapkv", reason="prefill") == 2
    assert value("evictions_total", 1, policy="ada-snapkv", reason="decode") == 1
    assert value("evictions_total", 1, policy="tova", reason="decode") == 5
    assert value("evicted_tokens_total", 1) == 640
    assert value("freed_blocks_total", 1) == 50
    assert value("store_blocks_total", 1) == 20
    assert value("postponed_evictions_total", 1, reason="ring") == 3
    assert value("postponed_evictions_total", 1, reason="turn") == 2
    assert value("postponed_evictions_total", 1, reason="blocks") == 0
    assert value("capped_prefix_hits_total", 1) == 4
    assert value("blocks_saved", 1) == 7 and value("mark_blocks", 1, mark="high") == 80
    assert value("published_stores_total", 1) == 6
    assert value("reused_stores_total", 1) == 13
    assert value("reused_tokens_total", 1) == 900
    assert value("idle_stores", 1) == 3
    assert value("saved_stores_total", 1) == 3 and value("refused_store_files_total", 1) == 1
    assert value("restored_stores_total", 1, tier="memory") == 2
    assert value("restored_stores_total", 1, tier="file") == 0
    assert value("restored_tokens_total", 1, tier="file") == 500
    assert value("restored_seconds_total", 1, tier="file") == 0.25
    assert value("store_memory_bytes", 1) == 0, "the last report's"
    assert value("eviction_seconds_count", 1) == 3
    assert value("eviction_seconds_sum", 1) == pytest.approx(0.207)
    assert value("eviction_seconds_bucket", 1, le="0.005") == 2
    assert value("request_kept_share_bucket", 1, le="0.25") == 1
    assert value("request_kept_share_bucket", 1, le="0.9") == 1
    assert value("request_kept_share_bucket", 1, le="1.0") == 2
    assert value("head_budget_spread_bucket", 1, le="1.25") == 0
    assert value("head_budget_spread_bucket", 1, le="1.5") == 1
    assert value("evictions_total", policy="ada-snapkv", reason="prefill") == 0, "not of engine 0"
    assert value("freed_blocks_total") == value("blocks_saved") == 0


def test_audits_by_policy_and_share(build):
    manager = StatLoggerManager(build(SETTINGS | {"audit": "1%"}, served_model_name="served"))
    audits = [("a", "tova", 0.2, 0.04, 1.0), ("b", "tova", 0.25, 4.0, 0.5), ("c", "tova", 1, 0, 1)]
    send(manager, Report(audits=audits, tokens_audited=96, audits_dropped=2))
    quarter = dict(policy="tova", kept="25%")
    assert value("audit_kl_nats_count", **quarter) == 2
    assert value("audit_kl_nats_sum", **quarter) == pytest.approx(4.04)
    assert value("audit_kl_nats_bucket", **quarter, le="0.05") == 1
    assert value("audit_agreement_sum", **quarter) == 1.5
    assert value("audit_kl_nats_count", policy="tova", kept="100%") == 1
    assert value("audited_tokens_total") == 96 and value("dropped_audits_total") == 2
    (family,) = [f for f in REGISTRY.collect() if f.name == "vllm_kvevict:audit_kl_nats"]
    named = {s.exemplar.labels["request_id"] for s in family.samples if s.exemplar}
    assert named == {"a", "b", "c"}


def test_no_audits_have_no_histograms(build):
    manager = StatLoggerManager(build(SETTINGS, served_model_name="served"))
    send(manager, Report(evictions={"tova": [1, 0]}))
    assert "vllm_kvevict:audit_kl_nats" not in ours()


def test_settings_as_labels(build):
    StatLoggerManager(build(SETTINGS, served_model_name="served"))
    (family,) = [f for f in REGISTRY.collect() if f.name == "vllm_kvevict:config_info"]
    (sample,) = family.samples
    assert sample.value == 1
    told = dict(policy="ada-snapkv", budget="25%", window="32", interval="128", floor="0.2",
                allow="tova,none", max_budget="", block_size="128", model_name="served",
                engine="0")  # fmt: skip
    assert told.items() <= sample.labels.items()


def test_shares_by_layer_are_a_digest():
    """Two files differ, one file is itself, and no label is longer than stores take."""
    model = ModelIdentity(architecture="any", layers=80, kv_heads=8, config="any")

    def shares(first: float, file: str = "/a", digest: str = "0") -> EvictionConfig:
        layers = (first, 2 - first, *[1.0] * 78)
        heads = tuple((1.0,) * 8 for _ in layers)
        probe = ProbeFile(file=file, sha256=digest)
        found = Profile(
            model=model, policy="probe", budget=96, layers=layers, heads=heads, probe=probe
        )
        return EvictionConfig(policy="ada-snapkv", profile=found)

    told = info(shares(0.5), 16)
    assert max(map(len, told.values())) < 100
    assert told == info(shares(0.5), 16)
    assert told["profile"] != info(shares(0.6), 16)["profile"]
    # Replicas may have one file in different places.
    assert told["profile"] == info(shares(0.5, file="/b"), 16)["profile"]
    assert told["profile"] != info(shares(0.5, digest="1"), 16)["profile"]
    assert len(told["profile"]) == 16 and set(told["profile"]) <= set("0123456789abcdef")


@pytest.mark.parametrize("budget, shortest", [(1024, 1024 + 128), ("100%", math.inf)])
def test_where_eviction_begins(build, budget, shortest):
    """A store of 7 blocks of 128 tokens, one that goes, and the window; or nothing ever."""
    manager = dict(policy="ada-snapkv", budget=budget, window=128)
    StatLoggerManager(build(manager, served_model_name="served", max_model_len=4096))
    assert value("evicts_from_tokens") == shortest


def test_without_eviction_there_is_nothing(build):
    build(SETTINGS)  # puts our wrapper in place
    manager = StatLoggerManager(build(), custom_stat_loggers=None)
    assert not any(isinstance(logger, EvictionStatLogger) for logger in manager.stat_loggers)
    assert ours() == []


def test_it_comes_before_all_other_loggers(build):
    from vllm.v1.metrics.loggers import LoggingStatLogger

    manager = StatLoggerManager(build(SETTINGS), custom_stat_loggers=[LoggingStatLogger])
    assert isinstance(manager.stat_loggers[0], EvictionStatLogger)
    assert sum(isinstance(each, EvictionStatLogger) for each in manager.stat_loggers) == 1
    send(manager, Report(postponed_blocks=1))  # vLLM's loggers would fail on the report


def test_a_later_engine_takes_the_names_over(build):
    config = build(SETTINGS, served_model_name="served")
    send(StatLoggerManager(config), Report(postponed_ring=5))
    send(StatLoggerManager(config), Report(postponed_ring=1))
    assert value("postponed_evictions_total", reason="ring") == 1


def test_metrics_of_the_kind_that_replaces_vllms(build):
    """Ray exports its own classes of metrics; its logger brings them as class attributes."""
    values: dict[str, float] = {}

    class Other:
        def __init__(self, *, name: str, **_: Any) -> None:
            self.name = name

        def labels(self, *_: Any, **__: Any) -> Any:
            return self

        def set(self, value: float) -> None:
            values[self.name] = value

    class OtherStatLogger(PrometheusStatLogger):
        _gauge_cls = Other

    manager = StatLoggerManager(build(SETTINGS), custom_stat_loggers=[OtherStatLogger])
    send(manager, Report(blocks_saved=8, postponed_ring=2))
    assert values["vllm_kvevict:blocks_saved"] == 8
    assert values["vllm_kvevict:config_info"] == 1
    assert "vllm_kvevict:blocks_saved" not in ours()


def test_the_periodic_line(build, records: list[logging.LogRecord]):
    manager = StatLoggerManager(build(SETTINGS), [0, 1])
    records.clear()
    send(manager, Report(postponed_turn=1), engine=1)
    send(
        manager,
        Report(evictions={"tova": [1, 2]}, tokens_evicted=7, blocks_freed=9,
               store_blocks_allocated=4, seconds=[0.002, 0.004, 0.006], blocks_saved=5),
        engine=1,
    )  # fmt: skip
    manager.log()
    assert [record.getMessage() for record in records] == [
        "Engine 001: KV eviction: 1 evictions in prefill, 2 in decode, 1 postponed, 7 tokens "
        "evicted, 5 blocks given back, 5 blocks saved now, 4.0 ms an eviction"
    ]
    manager.log()
    assert len(records) == 1, "nothing happened since"


def test_one_of_several_api_servers_is_silent(build, records: list[logging.LogRecord]):
    config = build(SETTINGS)
    config.parallel_config._api_process_count = 2
    manager = StatLoggerManager(config)
    records.clear()
    send(manager, Report(evictions={"tova": [1, 2]}))
    manager.log()
    assert records == []
