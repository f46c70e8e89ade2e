"""A client that means harm: whatever it asks for, it gets 200 or 400, and others get their answers.

The server evicts inside prompts and has a pool smaller than its longest sequence, so that requests
can ask for more than there is.
"""

import itertools
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import BASE, BLOCK_BYTES, PATIENCE_S
from tests.e2e.faults.sizes import size
from tests.e2e.faults.storm import POLICIES
from tests.e2e.faults.test_malformed import status
from tests.e2e.test_server import complete, wait_for
from tests.models import random_prompt
from vllm_kvevict.config.requests import KEYS

BLOCKS, LONGEST = 72, 4096
ARGUMENTS = [
    *BASE, "--kv-cache-memory-bytes", str(BLOCKS * BLOCK_BYTES), "--max-model-len", str(LONGEST),
    "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "96", "--kv-eviction-interval", "32",
    "--kv-eviction-prefill-interval", "128", "--kv-eviction-allow", ",".join(POLICIES),
]  # fmt: skip
STALLED_S = 1.0
CLIENTS = 6
BATCH = 60

NUMBERS = (
    0, 1, -1, 100, 2**31, 2**40, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"), True, False,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "1e3", "0x20", "-0", "50%", "nan%", "1e-300%", "\uff11\uff12", "\u202e\U0001f600",
    "\ud800", "\x00", "ba na", "9" * 5000, "ba " * 20_000,
)  # fmt: skip
OTHERS = (
    None, [], [1], [7] * 40, [999_999], [2**40], [-1], [0.5], ["1"], [True], [[1]], [1, "x", 0.5],
    [10**400], [7] * 5000, {}, {"a": 1},
)  # fmt: skip
WILD = NUMBERS + TEXTS + OTHERS

MEANT = {
    "kv_eviction": ("snapkv", "none", "nacl"),
    "kv_eviction_budget": (64, 4000, "25%"),
    "kv_eviction_interval": (0, 1, 64),
    "kv_eviction_prefill_interval": (0, 128, 4000),
    "kv_eviction_every": (0, 128, 4000),
    "kv_eviction_protect_first": (1, 32),
    "kv_eviction_when": ("always", "pressure"),
    "kv_eviction_at": (1, 150, -1, {"message": 0}, {"message": -2}, {"text": "na"}, {"text": "ba"}),
}
"""Values that have a meaning alone, for pairs that come further than their first key."""

PROMPT = random_prompt(300, seed=21)
CHAT = [dict(role="user", content="ba na " * 40), dict(role="user", content="na ba")]
COMPLETION = "/v1/completions", dict(prompt=PROMPT)
PLACES = (
    ("/v1/completions", dict(prompt="ba na " * 40)),
    ("/v1/completions", dict(prompt=[PROMPT, PROMPT[:50]], stream=True)),
    ("/v1/completions", dict(prompt=PROMPT[:200], n=3, temperature=1)),
    ("/v1/chat/completions", dict(messages=CHAT)),
    ("/v1/chat/completions", dict(messages=CHAT, stream=True)),
    ("/v1/responses", dict(input="ba na " * 40, max_output_tokens=2)),
    ("/v1/messages", dict(messages=CHAT[:1])),
    ("/tokenize", dict(prompt="ba na")),
)

Asked = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    with Server(tiny_model, ARGUMENTS, log, PATIENCE_S) as running:
        yield running


def asking(place: Asked, xargs: dict[str, Any]) -> Asked:
    path, content = place
    return path, dict(model="tiny", max_tokens=2) | content | dict(vllm_xargs=xargs)


def alone() -> Iterator[Asked]:
    """Every key with every value as a completion; in full once more somewhere else, or a third."""
    places = itertools.cycle(PLACES)
    keys = (*KEYS, "kv_eviction_x", "kv_eviction_\u00e9\x00")
    for number, (key, value) in enumerate(itertools.product(keys, WILD)):
        yield asking(COMPLETION, {key: value})
        if number % size(3, 1) == 0:
            yield asking(next(places), {key: value})


def pairs() -> Iterator[Asked]:
    """Every two keys, with values that mean something, in full all of them, and with one that
    does not."""
    places, wild = itertools.cycle((COMPLETION, *PLACES)), itertools.cycle(WILD)
    for first, second in itertools.combinations(KEYS, 2):
        meant = itertools.product(MEANT[first], MEANT[second])
        for one, other in itertools.islice(meant, 0, None, size(2, 1)):
            yield asking(next(places), {first: one, second: other})
        yield asking(next(places), {first: MEANT[first][0], second: next(wild)})
        yield asking(next(places), {first: next(wild), second: MEANT[second][0]})


class Health(threading.Thread):
    """Asks for ``/health`` again and again; ``slowest`` is the longest that it took, in seconds."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._url = server.url + "/health"
        self._enough = threading.Event()
        self.slowest, self.asked, self.failed = 0.0, 0, 0

    def __enter__(self) -> "Health":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join(60)

    def run(self) -> None:
        while not self._enough.wait(0.05):
            begin = time.monotonic()
            try:
                with urllib.request.urlopen(self._url, timeout=30) as answer:
                    self.failed += answer.status != 200
            except OSError:
                self.failed += 1
            self.slowest = max(self.slowest, time.monotonic() - begin)
            self.asked += 1


def send(server: Server, batch: list[Asked]) -> list[int]:
    """Statuses of requests sent by some clients at once; each must be 200 or 400."""

    def one(asked: Asked) -> int:
        code, text = status(server, *asked)
        shown = json.dumps(asked)
        assert code in (200, 400), f"{code} {text[:300]} {shown[:500]}"
        # An answer that has begun ends, and no message repeats megabytes.
        assert code == 200 or len(text) < 20_000, f"{len(text)} characters for {shown[:200]}"
        return code

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(one, batch))


def endure(server: Server, requests: list[Asked]) -> Counter[int]:
    """Send all in batches while somebody watches ``/health``.

    A machine that is busy with other things is slow too, so a batch that stalled is sent twice more
    and counts where it stalls each time.
    """
    found: Counter[int] = Counter()
    for start in range(0, len(requests), BATCH):
        batch, waited = requests[start : start + BATCH], []
        while not waited or (waited[-1] > STALLED_S and len(waited) < 3):
            with Health(server) as health:
                statuses = send(server, batch)
            assert health.failed == 0
            waited.append(health.slowest)
        assert min(waited) <= STALLED_S, f"/health took {waited} s beside {str(batch)[:500]}"
        found.update(statuses)
    return found


def unharmed(server: Server, before: list[dict[str, Any]], counted: dict[str, int]) -> None:
    """Nothing is left of the requests, and an ordinary one is answered as before."""
    for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_for(server, f"vllm:{metric}", 0)
    after = complete(server, PROMPT)
    assert after[0]["token_ids"] == before[0]["token_ids"]
    assert server.evictions()["evictions"] > counted["evictions"] > 0
    log = server.log.read_text()
    assert "the server's settings apply" not in log and "EngineDead" not in log


@pytest.mark.timeout(1200)
def test_every_key_alone_and_in_pairs(server):
    before, counted = complete(server, PROMPT), server.evictions()
    requests = [*alone(), *pairs()]
    begin = time.monotonic()
    found = endure(server, requests)
    print(f"\n{len(requests)} requests in {time.monotonic() - begin:.0f} s: {dict(found)}")
    assert found[200] > 100 and found[400] > 500
    unharmed(server, before, counted)


@pytest.mark.timeout(600)
def test_megabytes(server):
    """Texts and lists of 3 MB where a few words are meant; tokenising them would take seconds."""
    before, counted = complete(server, PROMPT), server.evictions()
    text = "ba na " * 500_000
    repeated = "c" * 3_000
    requests = [
        asking(COMPLETION, {"kv_eviction": text}),
        asking(COMPLETION, {"kv_eviction_" + text: 1}),
        asking(PLACES[0], {"kv_eviction_at": {"text": text}}),
        asking(
            ("/v1/completions", dict(prompt=repeated)),
            {"kv_eviction_at": {"text": "c" + "b" + repeated[:1500]}},
        ),
    ]
    found = Counter[int]()
    for one in requests:
        found += endure(server, [one])
    assert set(found) == {400}, found
    unharmed(server, before, counted)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "asked",
    [
        # The prompt fits, the replay of prompt and answer would not.
        dict(prefill_interval=0, max_tokens=1200),
    ],
)
def test_no_request_waits_without_end(server, asked):
    before, counted = complete(server, PROMPT), server.evictions()
    most = asked.pop("max_tokens", 2)
    xargs = {f"kv_eviction_{name}": value for name, value in asked.items()}
    place = "/v1/completions", dict(prompt=random_prompt(1600, seed=5), max_tokens=most)
    assert endure(server, [asking(place, xargs)] * 3) == {400: 3}
    unharmed(server, before, counted)
