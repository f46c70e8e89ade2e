"""Malformed ``vllm_xargs`` by the thousand: HTTP 400 each, and other requests never notice."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.faults.sizes import size
from tests.e2e.faults.storm import POLICIES
from tests.e2e.test_own_settings import asks
from tests.e2e.test_server import complete, wait_for
from tests.models import random_prompt
from vllm_kvevict.config.requests import KEYS

PROMPT = random_prompt(120, seed=5)
BYSTANDERS = [
    (random_prompt(400, seed=6), {}),
    (random_prompt(350, seed=7), asks("snapkv", at=300, budget="50%")),
]

junk = st.text(max_size=20).filter(lambda text: not text.strip().lstrip("-").isdigit())
fractions = st.floats(-1e6, 1e6).filter(lambda number: number != int(number))
no_number = st.one_of(
    junk, fractions,
    st.sampled_from([float("nan"), float("inf"), 10**400, "\uff11\uff12", "1e3", "0x20"]),
    st.lists(st.integers(), max_size=3), st.just("9" * 5000),
)  # fmt: skip
shares = st.floats(-1e3, 0) | st.floats(100.01, 1e9)
BAD = st.one_of(
    st.tuples(st.text(min_size=1, max_size=30).map("kv_eviction_".__add__), st.integers()).filter(
        lambda pair: pair[0] not in KEYS
    ),
    st.tuples(st.just("kv_eviction"), junk.filter(lambda t: t not in POLICIES) | st.integers()),
    st.tuples(
        st.just("kv_eviction_budget"),
        st.one_of(
            st.integers(max_value=32),
            junk.filter(lambda text: "%" not in text),
            shares.map("{}%".format),
            fractions,
            st.sampled_from(["nan%", "inf%", "%", "50%%", "5 0%", float("inf"), 10**400]),
        ),
    ),
    st.tuples(st.just("kv_eviction_interval"), st.integers(max_value=-1) | no_number),
    st.tuples(st.just("kv_eviction_protect_first"), st.integers(max_value=-1) | no_number),
    st.tuples(
        st.just("kv_eviction_at"),
        st.just(0) | st.integers(max_value=-120) | st.integers(min_value=121) | no_number,
    ),
)
GOOD = st.fixed_dictionaries(
    {},
    optional={
        "kv_eviction": st.sampled_from(POLICIES[:-1]),
        "kv_eviction_budget": st.sampled_from([64, "96", 1000, "25%", 160.0]),
        "kv_eviction_interval": st.sampled_from([0, 7, "64"]),
        "another_key": st.integers(),
    },
)
SHAPELESS = st.one_of(
    st.text(), st.integers(), st.lists(st.integers(), min_size=1),
    st.fixed_dictionaries({"kv_eviction_budget": st.dictionaries(st.text(), st.integers())}),
    st.fixed_dictionaries({"kv_eviction": st.none()}),
)  # fmt: skip
ONE_BAD = st.tuples(GOOD, BAD).map(lambda pair: pair[0] | dict([pair[1]]))
ASKED = st.integers(0, 5).flatmap(lambda die: ONE_BAD if die else SHAPELESS)
PLACES = (
    ("/v1/completions", dict(prompt=PROMPT)),
    ("/v1/completions", dict(prompt=[PROMPT, PROMPT], stream=True)),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="ba na")], stream=True)),
    ("/v1/responses", dict(input="ba na")),
    ("/v1/messages", dict(messages=[dict(role="user", content="ba na")], max_tokens=9)),
    (
        "/v1/messages",
        dict(messages=[dict(role="user", content="ba na")], max_tokens=9, stream=True),
    ),
)


class Bystander(threading.Thread):
    """Asks the same again and again, and keeps every answer."""

    def __init__(self, server: Any, prompt: list[int], asked: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._ask = lambda: complete(server, prompt, vllm_xargs=asked)[0]["token_ids"]
        self.alone = self._ask()
        self.answers: list[list[int]] = []
        self._enough = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self.answers.append(self._ask())
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        self._enough.set()
        self.join(120)


def status(server: Any, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and body of an answer, whatever it says."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.timeout(3600)
def test_malformed_settings_by_the_thousand(ample):
    bystanders = [Bystander(ample, prompt, asked) for prompt, asked in BYSTANDERS]
    before = ample.evictions()
    for bystander in bystanders:
        bystander.start()
    refused = []

    @settings(
        max_examples=size(400, 5000), deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(ASKED, st.sampled_from(PLACES))
    def refuse(asked: Any, place: tuple[str, dict[str, Any]]) -> None:
        path, content = place
        code, text = status(ample, path, content | dict(model="tiny", vllm_xargs=asked))
        assert code == 400, f"{code} {text}"
        refused.append(json.loads(text)["error"]["message"])

    try:
        refuse()
    finally:
        for bystander in bystanders:
            bystander.finish()
    ours = [message for message in refused if message.startswith("KV eviction: ")]
    print(f"\n{len(refused)} refused, {len(ours)} by this package; "
          f"{sum(len(b.answers) for b in bystanders)} answers beside them")  # fmt: skip
    assert len(ours) > len(refused) / 2
    for bystander in bystanders:
        assert bystander.error is None
        assert len(bystander.answers) >= 2
        assert all(answer == bystander.alone for answer in bystander.answers)
    wait_for(ample, "vllm:num_requests_running", 0)
    wait_for(ample, "vllm:kv_cache_usage_perc", 0)
    assert ample.evictions()["evictions"] > before["evictions"]
    log = ample.log.read_text()
    # vLLM's Anthropic router logs every refusal with a traceback, its own too.
    traces = [line for line in log.splitlines() if "Traceback" in line]
    assert all("[api_router.py:" in line for line in traces)
    assert " 500 " not in log and "the server's settings apply" not in log
