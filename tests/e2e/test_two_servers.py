"""A stock prefill server and an evicting decode server, with vLLM's NixlConnector between them.

A stand-in for the module ``nixl`` copies between the two processes (``tests/nixl_stand_in``), or
the real one if ``KVEVICT_NIXL`` names the folder that has it: `make connectors`.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

import pytest
import zmq
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from benchmarks.server import Server, free_port
from tests.e2e.test_handover import first_logprobs
from tests.e2e.test_handover_server import ask, proxy
from tests.e2e.test_offload import LateCopies
from tests.e2e.test_recipes import of_length
from tests.e2e.test_rollback import BODIES
from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt, random_text
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.profiles import random_profile
from vllm_kvevict.engine.remote_prefill import RemotePrefill
from vllm_kvevict.worker import cpu_offload

ROOT = Path(__file__).parents[2]
NIXL = os.environ.get("KVEVICT_NIXL") or str(ROOT / "tests" / "nixl_stand_in")
NEW_TOKENS = 50
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32, allow="none")
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024, enable_prefix_caching=True)
ASKED = dict(do_remote_decode=True, do_remote_prefill=False)
VLLM_WAITS_MS, TESTS_WAIT_MS = 5000, 30_000
"""Time limits of NIXL handshakes. On a busy machine, a working server may exceed vLLM's limit."""


def prompts(count, first=200):
    return [random_prompt(300 + 41 * (i % 6), seed=first + i) for i in range(count)]


def server_args(connector, role, *more):
    transfer = dict(kv_connector=connector, kv_role=role, kv_load_failure_policy="recompute")
    return [
        "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", str(128 << 20), "--seed", "0",
        "--kv-transfer-config", json.dumps(transfer), *more,
    ]  # fmt: skip


class Prefill:
    """A server that computes prompts and holds their blocks until they are read."""

    def __init__(self, server):
        self.server = server

    def compute(self, prompt, **more):
        """Compute a prompt; returns what its decode server is told."""
        body = dict(prompt=prompt, max_tokens=1, temperature=0, kv_transfer_params=ASKED) | more
        return self.server.post("/v1/completions", body)["kv_transfer_params"]


def serve(model, folder, connector, *more, role="kv_producer", port=None):
    path = os.pathsep.join([NIXL, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = dict(PYTHONPATH=path, VLLM_NIXL_SIDE_CHANNEL_PORT=str(port or free_port()))
    return Server(model, server_args(connector, role, *more), folder / f"{role}.log", env=env)


@pytest.fixture(scope="module")
def prefill(tiny_model, tmp_path_factory):
    """Stock vLLM: no flag of the plugin."""
    with serve(tiny_model, tmp_path_factory.mktemp("p"), "NixlConnector") as server:
        yield Prefill(server)


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@dataclass
class Transfers:
    """The transfers that this process asked for.

    Args:
        late: Most polls after which a transfer begins.
        fail: One in so many never begins and ends in an error; 0 for none.
        posted: Number of transfers.
        failed: Number of those that ended in an error.

    """

    late: int = 0
    fail: int = 0
    posted: int = 0
    failed: int = 0


@pytest.fixture
def transfers(monkeypatch):
    """NIXL in this process, where the decode server runs."""
    monkeypatch.syspath_prepend(NIXL)
    for name in [one for one in sys.modules if one.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    api = importlib.import_module("nixl._api")
    worker = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
    )
    found, rng = Transfers(), random.Random(3)
    setsockopt = zmq.Socket.setsockopt

    def patient(self, option, value):
        late = (option, value) == (zmq.RCVTIMEO, VLLM_WAITS_MS)
        return setsockopt(self, option, TESTS_WAIT_MS if late else value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", patient)

    class Agent(api.nixl_agent):
        def __init__(self, *args):
            super().__init__(*args)
            self._held = {}

        def transfer(self, handle, *more):
            found.posted += 1
            polls = rng.randint(0, found.late)
            fails = found.fail and rng.randrange(found.fail) == 0
            if polls or fails:
                self._held[handle] = polls, fails
                return "PROC"
            return super().transfer(handle, *more)

        def check_xfer_state(self, handle):
            if handle not in self._held:
                return super().check_xfer_state(handle)
            polls, fails = self._held.pop(handle)
            if polls > 1:
                self._held[handle] = polls - 1, fails
                return "PROC"
            if fails:
                found.failed += 1
                if hasattr(self, "spoil"):  # Of the stand-in alone.
                    self.spoil(handle)
                return "ERR"
            return super().transfer(handle)

    monkeypatch.setattr(worker, "NixlWrapper", Agent)
    monkeypatch.setattr(worker, "nixl_agent_config", api.nixl_agent_config)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    affinity = os.sched_getaffinity(0)
    yield found
    # vLLM moves the process to the core that it reserves for transfers.
    os.sched_setaffinity(0, affinity)


def decode(connector="NixlConnector", **options):
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_consumer", kv_load_failure_policy="recompute"
    )
    return OPTIONS | dict(kv_transfer_config=transfer) | options


def beside_offload(**options):
    """A decode server that has vLLM's offload as well."""
    connectors = [
        dict(kv_connector="NixlConnector", kv_role="kv_consumer"),
        dict(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(cpu_bytes_to_use=256 << 20),
        ),
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(connectors=connectors),
    )
    return OPTIONS | dict(kv_transfer_config=transfer) | options


def answer(run, prefill, texts, asked=None, new_tokens=NEW_TOKENS):
    """Compute prompts on the one server and answer them on the other."""
    more = asked or [{}] * len(texts)
    params = [
        dict(mine, kv_transfer_params=prefill.compute(p))
        for p, mine in zip(texts, more, strict=True)
    ]
    assert all(one["kv_transfer_params"]["do_remote_prefill"] for one in params)
    return run.generate(texts, new_tokens, params)


def check(run, oracle, texts, outputs, loaded=True):
    for text, output, lives in zip(texts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, text, output, lives) == (len(output), len(output))
        if loaded:
            assert lives[0].evictions[0].n == len(text), "did not evict in its first step"


@pytest.mark.parametrize("asked", [{}, {"kv_eviction": "none"}], ids=["evicts", "never evicts"])
def test_a_whole_prompt_gives_the_logprobs_of_one_server(tiny_model, prefill, transfers, asked):
    """A receiver that finds all of a prompt differed from the first token on (vllm#52617)."""
    texts = prompts(3, first=700)
    with engine(tiny_model, SETTINGS, **OPTIONS) as alone:
        expected = first_logprobs(alone, texts, [asked] * len(texts))
    with engine(tiny_model, SETTINGS, **decode()) as run:
        params = [asked | dict(kv_transfer_params=prefill.compute(text)) for text in texts]
        found = first_logprobs(run, texts, params)
        assert transfers.posted == len(texts) and not transfers.failed
        assert run.counters.evictions_prefill == (0 if asked else len(texts))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_tokens_are_those_of_one_server(tiny_model, oracle, prefill, transfers):
    texts = prompts(6)
    with engine(tiny_model, SETTINGS, **OPTIONS) as alone:
        expected = alone.generate(texts, NEW_TOKENS)
    with engine(tiny_model, SETTINGS, **decode()) as run:
        free, counts = run.free_blocks(), computed(run)
        outputs = answer(run, prefill, texts)
        check(run, oracle, texts, outputs)
        # The servers compute prompts in other chunks, so that near ties may fall otherwise.
        equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
        assert equal >= len(texts) - 2
        assert transfers.posted == len(texts) and not transfers.failed
        assert sum(counts) <= len(texts) * (NEW_TOKENS - 1 + 64)
        # Prompts are in the prefix cache now, as far as a hit may cover them.
        again = answer(run, prefill, texts)
        assert transfers.posted == len(texts)
        # A hit is computed again from an earlier token than a load: near ties may fall otherwise.
        check(run, oracle, texts, again)
        assert sum(a == b for a, b in zip(again, outputs, strict=True)) >= len(texts) - 2
        assert answer(run, prefill, texts) == again and transfers.posted == len(texts)
        assert run.free_blocks() == free
    # Every prompt's blocks were read or let go.
    until(lambda: prefill.server.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("count", [40, nightly(200)])
def test_late_and_failing_transfers(tiny_model, oracle, prefill, transfers, count):
    """One in ten fails; the prompt is then computed here."""
    transfers.late, transfers.fail = 6, 10
    with engine(tiny_model, SETTINGS, **decode(num_gpu_blocks_override=90)) as run:
        free = run.free_blocks()
        for first in range(0, count, 8):
            texts = prompts(min(8, count - first), 300 + first)
            outputs = answer(run, prefill, texts, new_tokens=40)
            check(run, oracle, texts, outputs)
        assert transfers.posted == count and count / 20 <= transfers.failed <= count / 5
        assert run.free_blocks() == free


def test_the_offload_keeps_what_was_loaded(tiny_model, oracle, prefill, transfers, monkeypatch):
    """The decode server loads what its cache has lost from its own host memory."""
    monkeypatch.setattr(cpu_offload, "CopyingWorker", LateCopies)
    transfers.late, transfers.fail = 6, 4
    texts = prompts(8, 1300)
    with engine(tiny_model, SETTINGS, **beside_offload(num_gpu_blocks_override=90)) as run:
        free = run.free_blocks()
        check(run, oracle, texts, answer(run, prefill, texts))
        assert transfers.posted == len(texts) and transfers.failed
        lose(run)
        counts = computed(run)
        again = run.generate(texts, NEW_TOKENS)
        check(run, oracle, texts, again)
        prompt_tokens = sum(counts) - len(texts) * (NEW_TOKENS - 1)
        assert prompt_tokens <= 0.4 * sum(map(len, texts)), "prompts came from host memory"
        assert transfers.posted == len(texts)
        whole = run.generate(texts, NEW_TOKENS, [{"kv_eviction": "none"}] * len(texts))
        check(run, oracle, texts, whole, loaded=False)
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_the_prefill_server_dies(tiny_model, oracle, tmp_path, transfers):
    """The decode server computes what it cannot load, known or unknown as the other server was."""
    texts = prompts(5, 1000)
    with engine(tiny_model, SETTINGS, **decode()) as run:
        free = run.free_blocks()
        for known, some in ((True, texts[:3]), (False, texts[3:])):
            with serve(tiny_model, tmp_path, "NixlConnector") as server:
                server = Prefill(server)
                if known:
                    check(run, oracle, some[:1], answer(run, server, some[:1]))
                    some = some[1:]
                params = [dict(kv_transfer_params=server.compute(text)) for text in some]
                os.killpg(server.server.process.pid, signal.SIGKILL)
                server.server.process.wait()
            posted = transfers.posted
            outputs = run.generate(some, NEW_TOKENS, params)
            check(run, oracle, some, outputs)
            # A server that was never met is asked for its memory first, and does not answer.
            assert transfers.posted - posted == (len(some) if known else 0)
        assert run.free_blocks() == free


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_over_http_through_the_proxy(tiny_model, tmp_path, ranks):
    """Both servers are processes of their own, and the proxy of deploy/ asks them."""
    both = ["--tensor-parallel-size", ranks]
    flags = [*both, "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "128"]
    flags += ["--kv-eviction-allow", "snapkv,none"]
    texts = prompts(12, 1100)
    with (
        serve(tiny_model, tmp_path, "NixlConnector", *both) as server,
        serve(tiny_model, tmp_path, "NixlConnector", *flags, role="kv_consumer") as decode,
        proxy(server.url, decode.url) as url,
    ):

        def tokens(url, text, **more):
            asked = dict(prompt=text, max_tokens=NEW_TOKENS, return_token_ids=True)
            return json.loads(ask(url, "/v1/completions", **asked, **more))["choices"][0][
                "token_ids"
            ]

        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(lambda text: tokens(url, text), texts))
        assert decode.evictions()["evictions_prefill"] == len(texts)
        # Each rank reads its heads.
        loads = len(texts) * int(ranks)
        until(lambda: decode.metric("vllm:nixl_xfer_time_seconds_count") == loads)
        # With a salt of their own, requests find nothing of what was loaded.
        own = [tokens(decode.url, text, cache_salt="own") for text in texts]
        assert decode.evictions()["evictions_prefill"] == 2 * len(texts)
        # The servers compute prompts in other chunks, so that near ties may fall otherwise.
        assert sum(a == b for a, b in zip(loaded, own, strict=True)) >= len(texts) - 2
        # The recipe for documents, which stock vLLM refuses.
        rag = dict(
            messages=[dict(role="user", content=random_text(n, seed=n)) for n in (200, 20)],
            max_tokens=NEW_TOKENS,
            vllm_xargs=dict(kv_eviction_at=dict(message=0)),
        )
        with pytest.raises(HTTPError, match="400"):
            ask(server.url, "/v1/chat/completions", **rag)
        answered = json.loads(ask(url, "/v1/chat/completions", **rag))
        assert answered["usage"]["completion_tokens"] == NEW_TOKENS
        assert decode.evictions()["evictions_prefill"] == 2 * len(texts) + 1
        until(lambda: decode.metric("vllm:nixl_xfer_time_seconds_count") == loads + int(ranks))
        # Each request of recipes.md, and one with every key.
        for body in BODIES:
            body = of_length(body, 500) | dict(max_tokens=4)
            body.pop("model", None)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answered = json.loads(ask(url, path, **body))
            assert answered["usage"]["completion_tokens"] == 4, body
        until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def logprobs(llm, texts, params):
    """The answers to prompts, and the log-probability of each of their tokens but the first."""
    asked = [
        SamplingParams(
            temperature=0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            prompt_logprobs=1,
            extra_args=more,
        )
        for more in params
    ]
    outputs = llm.generate([dict(prompt_token_ids=text) for text in texts], asked, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], [
        [one.prompt_logprobs[i][text[i]].logprob for i in range(1, len(text))]
        for one, text in zip(outputs, texts, strict=True)
    ]


@pytest.mark.nightly
def test_logprobs_of_a_prompt_are_those_of_stock_vllm(tiny_model, oracle, prefill, transfers):
    """A load brings no logits, so the prompt is computed (vllm#50792)."""
    texts = prompts(3, 1400)
    with engine(tiny_model, None, **OPTIONS) as stock:
        _, expected = logprobs(stock, texts, [None] * len(texts))
    with engine(tiny_model, SETTINGS, **decode()) as run:
        params = [dict(kv_transfer_params=prefill.compute(text)) for text in texts]
        outputs, found = logprobs(run.llm, texts, params)
        check(run, oracle, texts, outputs)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
        assert not transfers.posted
    until(lambda: prefill.server.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.nightly
def test_either_side_restarts_on_its_port(tiny_model, oracle, tmp_path, transfers):
    """The other side knows a server of this address that is no more (vllm#49238)."""
    texts, port = prompts(8, 1500), free_port()

    def started(servers, name):
        (tmp_path / name).mkdir()
        server = serve(tiny_model, tmp_path / name, "NixlConnector", port=port)
        return Prefill(servers.enter_context(server))

    with ExitStack() as servers:
        first = started(servers, "first")
        with engine(tiny_model, SETTINGS, **decode()) as run:
            free = run.free_blocks()
            check(run, oracle, texts[:2], answer(run, first, texts[:2]))
            lost = [dict(kv_transfer_params=first.compute(text)) for text in texts[2:4]]
            os.killpg(first.server.process.pid, signal.SIGKILL)
            first.server.process.wait()
            second = started(servers, "second")
            # What the first server computed is lost with it.
            check(run, oracle, texts[2:4], run.generate(texts[2:4], NEW_TOKENS, lost))
            posted = transfers.posted
            check(run, oracle, texts[4:6], answer(run, second, texts[4:6]))
            assert transfers.posted == posted + 2
            assert run.free_blocks() == free
        with engine(tiny_model, SETTINGS, **decode()) as run:
            check(run, oracle, texts[6:], answer(run, second, texts[6:]))
            assert transfers.posted == posted + 4
        until(lambda: second.server.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.nightly
def test_points_and_requests_that_never_evict(tiny_model, oracle, prefill, transfers):
    """What follows a point is computed again over the loaded blocks."""
    texts = prompts(3, 600)
    asked = [{"kv_eviction_at": 200}, {"kv_eviction": "none"}, {}]
    with engine(tiny_model, SETTINGS, **OPTIONS) as alone:
        expected = alone.generate(texts, NEW_TOKENS, asked)
    with engine(tiny_model, SETTINGS, **decode()) as run:
        outputs = answer(run, prefill, texts, asked)
        check(run, oracle, texts, outputs, loaded=False)
        assert outputs[1] == expected[1], "the request that never evicts"
        first = [lives[0].evictions[0].n for lives in run.lives() if lives[0].evictions]
        assert first == [200, len(texts[2])] and transfers.posted == 3
        # The prefix cache holds nothing that was computed after an eviction.
        again = run.generate(texts, NEW_TOKENS, [{"kv_eviction": "none"}] * 3)
        check(run, oracle, texts, again, loaded=False)
    until(lambda: prefill.server.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.nightly
def test_auto_gives_all_layers_one_budget(tiny_model_kv4, tmp_path, transfers):
    """A profile would make several groups, and the other server has one."""
    path, _ = random_profile(tmp_path, tiny_model_kv4)
    settings = dict(policy="auto", budget="25%", interval=32, profile=str(path))
    texts = prompts(3)
    with (
        serve(tiny_model_kv4, tmp_path, "NixlConnector") as server,
        engine(tiny_model_kv4, settings, **decode()) as run,
    ):
        assert run.worker.eviction_config.policy == "probe"
        assert len(run.scheduler.kv_cache_config.kv_cache_groups) == 1
        outputs = answer(run, Prefill(server), texts)
        check(run, MaskedModel(tiny_model_kv4), texts, outputs)
        assert transfers.posted == 3


def without_replay(monkeypatch):
    monkeypatch.setattr(RemotePrefill, "rewind", lambda *_: None)
    monkeypatch.setattr(RemotePrefill, "replayed", lambda *_: 0)


def test_without_replay_it_evicts_later(tiny_model, oracle, prefill, transfers, monkeypatch):
    without_replay(monkeypatch)
    texts = prompts(2, 700)
    with engine(tiny_model, SETTINGS, **decode()) as run:
        outputs = answer(run, prefill, texts)
        with pytest.raises(AssertionError, match="did not evict in its first step"):
            check(run, oracle, texts, outputs)


@pytest.mark.nightly
def test_a_prefill_server_with_the_same_flags(tiny_model, oracle, tmp_path, transfers):
    """It never evicts what it hands over, which is then whole; other requests evict."""
    flags = "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "128"
    texts = prompts(3, 800)
    with (
        serve(tiny_model, tmp_path, "NixlConnector", *flags) as server,
        engine(tiny_model, SETTINGS, **decode()) as run,
    ):
        prefill = Prefill(server)
        outputs = answer(run, prefill, texts)
        check(run, oracle, texts, outputs)
        assert transfers.posted == 3 and server.evictions()["evictions"] == 0
        chat = dict(messages=[dict(role="user", content=random_text(100, seed=1))] * 2)
        asked = dict(max_tokens=1, kv_transfer_params=ASKED)
        point = dict(vllm_xargs=dict(kv_eviction_at=dict(message=0)))
        handed = server.post("/v1/chat/completions", chat | asked | point)["kv_transfer_params"]
        assert handed["do_remote_prefill"] and server.evictions()["evictions"] == 0
        run.generate([[5, 6]], 1, [dict(kv_transfer_params=handed)])  # Lets the blocks go.
        with pytest.raises(HTTPError) as refused:
            prefill.compute(texts[0], max_tokens=2)
        assert refused.value.code == 400
        message = json.loads(refused.value.read())["error"]["message"]
        assert "set max_tokens to 1, not 2" in message
        server.post("/v1/completions", dict(prompt=texts[0], max_tokens=4))
        assert server.evictions()["evictions"] == 1
        until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.nightly
def test_push(tiny_model, oracle, tmp_path, transfers):
    """The prefill server writes into the blocks of the decode server.

    It finds them by the id of the request, which proxies give to both servers.
    """
    texts = prompts(4, 900)
    with (
        serve(tiny_model, tmp_path, "NixlPushConnector") as server,
        engine(tiny_model, SETTINGS, **decode("NixlPushConnector")) as run,
    ):
        free, outputs = run.free_blocks(), {}

        def push(text, number):
            asked = Prefill(server).compute(text, request_id=f"same-{number}")
            params = SamplingParams(
                temperature=0,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                extra_args=dict(kv_transfer_params=asked),
            )
            name = f"cmpl-same-{number}-0"
            run.llm.llm_engine.add_request(name, dict(prompt_token_ids=text), params)
            return name

        run.recorder.lives.clear()
        for number, text in enumerate(texts):
            push(text, number)
        deadline = time.monotonic() + 200
        while run.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline, "nothing was pushed"
            for output in run.llm.llm_engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        for number, text in enumerate(texts):
            name = f"cmpl-same-{number}-0"
            (lives,) = [mine for key, mine in run.recorder.lives.items() if key.startswith(name)]
            assert lives[0].evictions[0].n == len(text), "did not evict in its first step"
            agreed = check_tokens(oracle, text, outputs[name], lives)
            assert agreed == (NEW_TOKENS, NEW_TOKENS)
        assert run.free_blocks() == free
        # A client leaves while the other server stands still (vllm#46283). vLLM keeps the blocks
        # until it hears of the transfer, with eviction and without.
        name = push(random_prompt(400, seed=990), 9)
        os.killpg(server.process.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                run.llm.llm_engine.step()
            run.llm.llm_engine.abort_request([name])
            check(run, oracle, texts[:2], run.generate(texts[:2], NEW_TOKENS))
            assert free - run.free_blocks() == -(-400 // 32)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: run.generate([[5, 6]], 1) and run.free_blocks() == free)
        until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def until(condition):
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
