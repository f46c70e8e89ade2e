"""The dashboard and the alerts ask for what a server publishes, and Prometheus understands them.

What a server publishes is taken from vLLM's own manager of stat loggers, eviction on.
"""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from benchmarks.server import free_port
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.metrics import prometheus
from vllm_kvevict.metrics.report import STATS_KEY, Report
from vllm_kvevict.tools.measure.loss import loss_of
from vllm_kvevict.tools.measure.push import registry
from vllm_kvevict.tools.measure.score import Score

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
RECORDED = [rule for group in ALERTS["groups"] for rule in group["rules"] if "record" in rule]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"] if "alert" in rule]
VARIABLES = [v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""


TESTS = ["alerts_test.yml", "objectives_test.yml"]


def found(program: str) -> str | None:
    """Of the PATH, or what packaging/setup_prometheus.sh unpacked."""
    own = ROOT / ".cache" / "prometheus" / "usr" / "bin" / program
    return str(own) if own.is_file() else shutil.which(program)


def needs(program: str) -> Any:
    return pytest.mark.skipif(
        found(program) is None,
        reason=f"{program} is not here; packaging/setup_prometheus.sh unpacks Debian's",
    )


@pytest.fixture
def manager(build) -> Iterator[StatLoggerManager]:
    yield StatLoggerManager(build(dict(policy="ada-snapkv", audit="1%"), served_model_name="m"))
    while prometheus._registered:
        REGISTRY.unregister(prometheus._registered.pop())


def work(manager: StatLoggerManager) -> None:
    """One step in which a little of everything happened."""
    report = Report(
        evictions={"ada-snapkv": [1, 2]}, tokens_evicted=9, blocks_freed=9,
        store_blocks_allocated=3,
        postponed_ring=1, prefix_hits_capped=1, kept_share=[0.3], seconds=[0.02], head_spread=[1.4],
        blocks_saved=6, requests_whole=1, requests_evicted=2, stores_saved=1, files_refused=1,
        stores_restored_memory=1, tokens_restored_memory=900, bytes_restored_memory=4096,
        stores_restored_file=1, tokens_restored_file=900, bytes_restored_file=4096,
        seconds_restored_memory=0.1, seconds_restored_file=0.2,
        store_bytes=4096,
        audits=[("cmpl-1", "ada-snapkv", 0.12, 0.03, 0.94)], tokens_audited=32, audits_dropped=1,
    )  # fmt: skip
    stats = SchedulerStats(1, 1, kv_cache_usage=0.5, kv_connector_stats={STATS_KEY: vars(report)})
    stats.prefix_cache_stats.requests = stats.prefix_cache_stats.queries = 4
    iteration = IterationStats()
    iteration.num_generation_tokens = 5
    iteration.time_to_first_tokens_iter, iteration.inter_token_latencies_iter = [0.1], [0.02]
    iteration.finished_requests = [
        FinishedRequestStats(finish_reason=FinishReason.STOP, num_prompt_tokens=900)
    ]
    manager.record(stats, iteration)


MEASURED = registry(
    "m", [("25%", [loss_of("all", [Score(1, "chat", 9, 4, 0.0, -1.0, 4, 4)])])], 1.0
)
"""What ``vllm-kvevict measure --recorded`` pushes."""


def published() -> dict[str, set[str]]:
    """Labels of every sample name, of a server and of what is pushed."""
    found: dict[str, set[str]] = defaultdict(set)
    families = [*REGISTRY.collect(), *MEASURED.collect()]
    for sample in (sample for family in families for sample in family.samples):
        found[sample.name] |= sample.labels.keys()
    return found


def asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Every metric of an expression, with the labels it is selected by."""
    for name, labels in re.findall(r"(vllm\w*:\w+)(?:\{(.*?)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*=", labels))


def test_metrics_and_labels_exist(manager):
    work(manager)
    names, grouped = published(), 0
    rules = [rule["expr"] for rule in (*RECORDED, *RULES)]
    for expression in [*QUERIES, *VARIABLES, *rules]:
        metrics = list(asked(expression))
        assert metrics, expression
        for name, labels in metrics:
            assert name in names, f"no server publishes {name}"
            assert labels <= names[name] | SCRAPED, expression
        for labels in re.findall(r"(?:by|on) \((.*?)\)", expression):
            grouped += 1
            wanted = {label.strip() for label in labels.split(",")}
            assert all(wanted <= names[name] | SCRAPED for name, _ in metrics), expression
    assert grouped > 10


def documented(page: str) -> set[str]:
    """Metrics of a page's table; in one cell only the first has the prefix."""
    cells = re.findall(r"^\| (`vllm_kvevict:.*?`) \|", page, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    return {prometheus.PREFIX + name.removeprefix(prometheus.PREFIX) for name in names}


def test_every_metric_of_ours_is_shown_and_documented(manager):
    work(manager)
    pushed = {family.name for family in MEASURED.collect()}
    assert documented((ROOT / "docs" / "recorded.md").read_text()) == pushed
    ours = {n for n in published() if n.startswith("vllm_kvevict:") and not n.endswith("_created")}
    ours -= pushed
    table = (ROOT / "docs" / "metrics.md").read_text()
    shown = " ".join(QUERIES)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours}
    assert len(families) == 36
    for family in families:
        assert family in shown, f"no panel shows {family}"
    assert documented(table) == families
    assert set(re.findall(r"`(vllm_kvevict:\w+)`", table)) <= families


def test_panels_lie_side_by_side():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + i, grid["y"] + j) for i in range(grid["w"]) for j in range(grid["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"


def test_alerts_name_records_and_lead_to_the_runbook():
    names = {rule["record"] for rule in RECORDED}
    used = {name for rule in RULES for name in re.findall(r"\bmodel:[\w:]+", rule["expr"])}
    assert used == names
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in RULES)
    for rule in RULES:
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert page.endswith("/runbook.md") and anchor == rule["alert"].lower()


def test_critical_alerts_begin_with_what_needs_no_restart():
    """A section of the runbook names it before a rollback, with the time that a rollback takes."""
    page = (ROOT / "docs" / "runbook.md").read_text()
    critical = [rule["alert"] for rule in RULES if rule["labels"]["severity"] == "critical"]
    assert len(critical) == 3
    for name in critical:
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        first = section.strip().split("\n\n")[0]
        assert first.startswith("**First.**"), name
        off, back = first.index("#switch-off-without-a-restart"), first.index("#rollback")
        assert off < back and "150 seconds" in first[back:], name
    drain = (FOLDER.parent / "helm" / "drain" / "kustomization.yaml").read_text()
    assert "terminationGracePeriodSeconds: 150" in drain or "value: 150" in drain
    about = page.split("## Switch off without a restart\n")[1].split("\n## ")[0]
    assert '{"kv_eviction": "none"}' in about and "--kv-eviction-allow none" in about


def test_every_alert_has_a_test_that_it_fires():
    fires = set()
    for file in TESTS:
        for scenario in yaml.safe_load((FOLDER / file).read_text())["tests"]:
            asked = scenario["alert_rule_test"]
            fires |= {case["alertname"] for case in asked if case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in RULES}


@needs("promtool")
def test_alerts_fire_when_they_should():
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", *TESTS]):
        done = subprocess.run(
            [found("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seconds", [("2.5", "0.1"), ("1.0", "0.05")])
def test_the_operator_gets_the_same_rules_with_its_own_objectives(seconds):
    ttft, itl = seconds
    done = subprocess.run(
        [FOLDER / "prometheus_rule.sh"], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "TTFT": ttft, "ITL": itl, "RUNBOOK": "https://w.org/k"},
    )  # fmt: skip
    made = yaml.safe_load(done.stdout)
    assert made["kind"] == "PrometheusRule"
    text = (FOLDER / "alerts.yml").read_text()
    for old, new in (("2.5", ttft), ("0.1", itl)):
        text = text.replace(f'le="{old}"', f'le="{new}"')
        text = text.replace(f"than {old} seconds", f"than {new} seconds")
    text = text.replace("https://runbooks.example.com/vllm-kvevict", "https://w.org/k")
    assert made["spec"] == yaml.safe_load(text)


NOT_COMPARED = {
    "allow": "It decides which keys are refused.",
    "max_budget": "It decides which keys are refused.",
    "attention": "Both kernels compute the same up to rounding.",
    "kernels": "Both kernels compute the same up to rounding.",
    "audit": "It measures evictions.",
    "calibrate_seconds": "The profile that results is compared.",
    "ring_memory": "It decides how many requests evict in one step, as the load does.",
    "store_memory": "It limits memory.",
    "store_path": "Replicas may have one folder at different places.",
}
"""Settings of which replicas may differ and answer the same, with the reason."""


def test_replicas_are_compared_by_all_that_changes_answers():
    (rule,) = (rule for rule in RULES if rule["alert"] == "KvEvictionSettingsDiffer")
    (labels,) = re.findall(r"group by \(([^()]*)\)", rule["expr"])
    compared = {label.strip() for label in labels.split(",")}
    known = prometheus.info(EvictionConfig(policy="ada-snapkv"), 16).keys()
    assert compared - {"model_name"} == known - NOT_COMPARED.keys()
    assert NOT_COMPARED.keys() <= known


class Metrics(BaseHTTPRequestHandler):
    """/metrics as vLLM's API server answers it: the plain format, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        self.wfile.write(generate_latest())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@needs("prometheus")
def test_prometheus_answers_every_query(manager, tmp_path):
    metrics, port = free_port(), free_port()
    server = ThreadingHTTPServer(("127.0.0.1", metrics), Metrics)
    Thread(target=server.serve_forever, daemon=True).start()
    config = tmp_path / "prometheus.yml"
    target = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}))
    process = subprocess.Popen(
        [found("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}") as answer:
            return json.load(answer)["data"]["result"]

    def scrapes() -> int:
        try:
            seen = ask("vllm_kvevict:blocks_saved[1m]")
        except OSError:
            return 0
        return len(seen[0]["values"]) if seen else 0

    try:
        deadline = time.monotonic() + 60
        while scrapes() < 4:
            assert time.monotonic() < deadline, "Prometheus did not scrape"
            work(manager)
            time.sleep(0.3)
        for expression in QUERIES:
            for variable, value in {
                "$__rate_interval": "30s", "$model_name": "m", "$instance": ".*", "$engine": ".*",
            }.items():  # fmt: skip
                expression = expression.replace(variable, value)
            result = ask(expression)
            assert result, f"no answer to {expression}"
            assert all(point["value"][1] != "NaN" for point in result), expression
        for rule in (*RECORDED, *RULES):
            ask(rule["expr"])
    finally:
        process.terminate()
        process.wait(30)
        server.shutdown()
        server.server_close()
