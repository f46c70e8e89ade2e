"""``vllm-kvevict audit``: the table of a server's metrics."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.http_stand_in import JsonHandler, served
from vllm_kvevict.metrics.audited import AGREEMENT, NATS, kept_label
from vllm_kvevict.tools.audit.__main__ import main
from vllm_kvevict.tools.audit.table import Audits, lines, read

SEEN = [
    ("0", "probe", 0.2, 0.004, 1.0),
    ("1", "probe", 0.25, 0.25, 0.5),
    ("0", "probe", 0.52, 20.0, 0.0),
    ("0", "ada-defensive", 0.06, 0.02, 0.9),
]


def metrics(seen) -> bytes:
    """As two engines of a server publish them."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine", "policy", "kept"]

    def histogram(name, buckets):
        return Histogram(f"vllm_kvevict:{name}", "x", labels, buckets=buckets, registry=registry)

    nats, agreement = histogram("audit_kl_nats", NATS), histogram("audit_agreement", AGREEMENT)
    evictions = Counter("vllm_kvevict:evictions", "x", ["engine"], registry=registry)
    dropped = Counter("vllm_kvevict:dropped_audits", "x", ["engine"], registry=registry)
    for engine in "01":
        evictions.labels(engine).inc(50)
        dropped.labels(engine).inc(1)
    for engine, policy, kept, kl, agreed in seen:
        nats.labels("m", engine, policy, kept_label(kept)).observe(kl)
        agreement.labels("m", engine, policy, kept_label(kept)).observe(agreed)
    return generate_latest(registry)


@pytest.mark.parametrize(
    "share, label",
    [
        (0.0, "6.25%"),
        (0.07, "6.25%"),
        (0.11, "12.5%"),
        (0.25, "25%"),
        (0.27, "25%"),
        (0.55, "50%"),
        (0.8, "100%"),
        (1, "100%"),
    ],
)
def test_shares_are_rounded(share, label):
    assert kept_label(share) == label


def test_engines_are_added_up():
    summary = read(metrics(SEEN).decode())
    assert (summary.evictions, summary.dropped) == (100, 2)
    kept = [(one.policy, one.kept, one.count) for one in summary.audits]
    assert kept == [("ada-defensive", "6.25%", 1), ("probe", "25%", 2), ("probe", "50%", 1)]
    two, one = summary.audits[1:]
    assert two.nats == pytest.approx(0.254) and two.agreement == 1.5
    assert (two.quantile(0.5), two.quantile(0.9)) == (0.01, 0.3)
    assert one.quantile(0.5) == math.inf
    table = "\n".join(lines(summary))
    assert "4 of 100 evictions were audited, 2 more were drawn" in table
    assert "0.127" in table and "75%" in table


def test_no_audits_no_quantile():
    assert Audits("probe", "25%").quantile(0.5) == math.inf


@pytest.fixture
def server():
    """Answers ``/metrics`` with ``server.text``."""

    class Answer(JsonHandler):
        text = metrics(SEEN)

        def do_GET(self) -> None:
            self.reply(200 if self.path == "/metrics" else 404, self.text)

    with served(Answer) as Answer.url:
        yield Answer


@pytest.mark.parametrize("ending", ["", "/", "/metrics"])
def test_the_command(server, capsys, ending):
    assert main([f"{server.url}{ending}"]) == 0
    assert "probe" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_sentence(server, capsys):
    url = server.url
    server.text = metrics([])
    assert main([url]) == 1
    assert "--kv-eviction-audit 1%" in capsys.readouterr().err
    for wrong in (f"{url}/other", "nowhere", "http://127.0.0.1:9"):
        assert main([wrong]) == 1
        assert capsys.readouterr().err.startswith("error: ")
