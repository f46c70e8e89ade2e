"""A fault of one client, one folder or one adapter changes no answer of the other clients.

The server keeps stores in files alone, so that each restored store is read from the folder. Its KV
cache has 64 blocks of 32 tokens, which three long prompts fill.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import EVICTION, PATIENCE_S, arguments
from tests.e2e.faults.processes import group
from tests.e2e.faults.reports import (
    DOCUMENT,
    LIMIT,
    NEVER,
    ONE_CHOICE,
    POINT,
    body,
    cached,
    chat_body,
    evictions,
    post,
    post_all,
    status_of,
    switch,
    tokens_of,
    turn_over,
)
from tests.e2e.faults.sizes import size
from tests.e2e.faults.test_malformed import status
from tests.e2e.faults.test_replaced_adapter import call, write_adapter
from tests.e2e.test_lora import RANK
from tests.e2e.test_own_settings import asks
from tests.e2e.test_server import wait_for
from tests.models import random_prompt

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

QUESTION = random_prompt(20, seed=99)
Asked = dict[str, Any]


def request(seed: int, **options: Any) -> Asked:
    """A question about a document, which ends at an eviction point."""
    prompt = random_prompt(DOCUMENT, seed=20_000 + seed) + QUESTION
    return body(prompt, **(dict(vllm_xargs=POINT) | options))


class Folder:
    """A server and its folder of stores."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root = server, root

    @property
    def own(self) -> Path:
        """The folder of files of this server's fingerprint."""
        (folder,) = [path for path in self.root.iterdir() if "away" not in path.name]
        return folder

    def files(self) -> set[Path]:
        return set(self.root.glob("*/[0-9a-f]*.safetensors"))

    def restored(self) -> int:
        return self.server.evictions()["stores_restored_file"]

    def saved(self, seed: int) -> tuple[list[int], Path]:
        """Ask about a new document; returns the answer and the file of its store."""
        known, deadline = self.files(), time.monotonic() + 120
        tokens = tokens_of(self.server.post("/v1/completions", request(seed)))
        while not (new := self.files() - known):
            assert time.monotonic() < deadline, "the store was not written"
            time.sleep(0.05)
        (file,) = new
        return tokens, file

    def ask(self, seeds: list[int], **options: Any) -> list[list[int]]:
        """Answers to questions that are sent at once."""
        found = post_all(self.server, [request(seed, **options) for seed in seeds])
        return list(map(tokens_of, found))

    def quiet(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            wait_for(self.server, f"vllm:{name}", 0)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> Iterator[Folder]:
    root = tmp_path_factory.mktemp("stores")
    words = [
        *arguments(64, LIMIT), *EVICTION, "--kv-eviction-store-path", str(root),
        "--enable-prompt-tokens-details", "--enable-lora", "--max-loras", "2",
        "--max-lora-rank", str(RANK), "--distributed-executor-backend", "mp",
    ]  # fmt: skip
    env = dict(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", VLLM_SERVER_DEV_MODE="1")
    log = tmp_path_factory.mktemp("one-client") / "log"
    with Server(tiny_model, words, log, PATIENCE_S, env) as server:
        yield Folder(server, root)
        text = server.log.read_text()
        # vLLM's Anthropic router logs every refusal with a traceback.
        traces = [line for line in text.splitlines() if "Traceback" in line]
        assert all("[api_router.py:" in line for line in traces) and '" 500 ' not in text
        assert text.count("a store was not written") <= 1
        assert text.count("stores were not read from files") <= 1


# The folder


def instead(new: Callable[[Path], Any]) -> Callable[[Folder], Callable[[], None]]:
    """A fault that replaces the folder of files by something else."""

    def fault(folder: Folder) -> Callable[[], None]:
        own = folder.own
        away = own.with_name(own.name + ".away")
        own.rename(away)
        new(own)

        def mend() -> None:
            if own.is_mount():
                subprocess.run(["umount", own], check=True)
            if own.is_dir() and not own.is_symlink():
                shutil.rmtree(own)
            else:
                own.unlink(missing_ok=True)
            away.rename(own)

        return mend

    return fault


def full(own: Path) -> None:
    """Mount a file system of 64 KiB on the folder, which needs rights that most users
    lack."""
    own.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", own]
    if subprocess.run(small, capture_output=True).returncode:
        own.rmdir()
        own.with_name(own.name + ".away").rename(own)
        pytest.skip("this user may not mount")


def without_descriptors(folder: Folder) -> Callable[[], None]:
    """A fault that lets the server's engine core and worker open no further file."""
    members = psutil.Process(folder.server.process.pid).children(recursive=True)
    assert len(members) >= 2
    kind = resource.RLIMIT_NOFILE
    before = [(process.pid, resource.prlimit(process.pid, kind)) for process in members]
    for pid, (_, hard) in before:
        resource.prlimit(pid, kind, (3, hard))

    def mend() -> None:
        for pid, limits in before:
            resource.prlimit(pid, kind, limits)

    return mend


FAULTS = {
    "a file": instead(Path.touch),
    "a loop of links": instead(lambda own: own.symlink_to(own.name)),
    "a link to nowhere": instead(lambda own: own.symlink_to("/nonexistent/folder")),
    "gone": instead(lambda own: None),
    "full": instead(full),
    "no descriptors": without_descriptors,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_fails_costs_no_answer(folder, fault):
    """Its stores are computed; once it is back, they are read again and new ones written."""
    first = 100 * list(FAULTS).index(fault)
    expected = [folder.saved(first + number)[0] for number in range(3)]
    turn_over(folder.server)
    mend = FAULTS[fault](folder)
    try:
        found = folder.ask([first, first + 1, first + 3])
        assert status_of(folder.server, "/health") == ""
    finally:
        mend()
    assert found[:2] == expected[:2]
    assert folder.ask([first + 3], cache_salt="alone") == found[2:]
    turn_over(folder.server)
    before = folder.restored()
    assert folder.ask([first + 2]) == expected[2:] and folder.restored() == before + 1
    folder.saved(first + 4)
    folder.quiet()


def test_a_folder_mounted_read_only_is_read(folder):
    """Binding the folder to itself needs rights that most users lack."""
    own = folder.own
    mounted = subprocess.run(["mount", "--bind", own, own], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        expected = [folder.saved(900)[0]]
        turn_over(folder.server)
        subprocess.run(["mount", "-o", "remount,bind,ro", own], check=True)
        before = folder.restored()
        found = folder.ask([900, 901])
        assert found[:1] == expected and folder.restored() == before + 1
    finally:
        subprocess.run(["umount", own], check=True)
    assert folder.ask([901], cache_salt="alone") == found[1:]
    folder.saved(902)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


ODD: list[Callable[[Path, Path], Any]] = [
    lambda path, other: os.mkfifo(path),
    lambda path, other: path.symlink_to("/dev/zero"),
    lambda path, other: path.symlink_to(path.name),
    lambda path, other: path.mkdir(),
    lambda path, other: path.touch(),
    lambda path, other: sparse(path),
    lambda path, other: shutil.copy(other, path),
    lambda path, other: path.write_bytes(other.read_bytes()[:-1]),
    lambda path, other: path.symlink_to(other),
]


def test_what_stands_in_the_place_of_a_file_is_not_used(folder):
    """A pipe, devices, folders, another document's store: nothing hangs, grows or is believed."""
    seeds = [1000 + number for number in range(len(ODD) + 1)]
    expected, paths = zip(*map(folder.saved, seeds), strict=True)
    turn_over(folder.server)
    for path, put in zip(paths, ODD, strict=False):
        path.unlink()
        put(path, paths[-1])
    before, resident = folder.restored(), sum(p.memory_info().rss for p in group(folder.server))
    begin = time.monotonic()
    assert folder.ask(seeds) == list(expected)
    assert time.monotonic() - begin < 120
    assert folder.restored() == before + 1, "the last one's own file"
    grown = sum(p.memory_info().rss for p in group(folder.server)) - resident
    assert grown < 200 << 20
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
    folder.quiet()


# Resets and pauses while stores are read

RESETS = (
    "/reset_prefix_cache",
    "/reset_prefix_cache?reset_running_requests=true",
    "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
)


@pytest.mark.parametrize("path", RESETS)
def test_resets_while_stores_are_read(folder, path):
    seeds = [2000 + 10 * RESETS.index(path) + number for number in range(5)]
    expected = [folder.saved(seed)[0] for seed in seeds]
    turn_over(folder.server)
    done, answers = threading.Event(), []

    def reset() -> None:
        # Requests that are preempted without end do not end, in stock vLLM either.
        while not done.wait(0.05) and len(answers) < 12:
            answers.append(switch(folder.server, path)["success"])

    thread = threading.Thread(target=reset)
    thread.start()
    try:
        found = [folder.ask(seeds) for _ in range(3)]
    finally:
        done.set()
        thread.join()
    assert found == [expected] * 3 and len(answers) > 3
    # The weights are those of the files, so these are read again.
    turn_over(folder.server)
    before, deadline = folder.restored(), time.monotonic() + 60
    while folder.restored() == before:
        assert time.monotonic() < deadline, "no file is read any more"
        assert folder.ask(seeds) == expected
        turn_over(folder.server)
    folder.quiet()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("clear", ["true", "false"])
def test_pauses_while_stores_are_read(folder, mode, clear):
    number = 10 * (2 * ["keep", "wait", "abort"].index(mode) + (clear == "true"))
    seeds = [3000 + number + each for each in range(4)]
    expected = [folder.saved(seed)[0] for seed in seeds]
    turn_over(folder.server)
    with ThreadPoolExecutor(6) as threads:
        asked = threads.submit(
            post_all, folder.server, [request(seed, ignore_eos=True) for seed in seeds]
        )
        time.sleep(0.1)
        paused = threads.submit(switch, folder.server, f"/pause?mode={mode}&clear_cache={clear}")
        time.sleep(0.3)
        late = threads.submit(folder.ask, seeds[:1])
        time.sleep(0.3)
        switch(folder.server, "/resume")
        paused.result(300)
        for answer, tokens in zip(asked.result(300), expected, strict=True):
            choice = answer["choices"][0]
            whole = choice["finish_reason"] != "abort"
            assert whole or mode == "abort"
            assert choice["token_ids"] == tokens[: None if whole else len(choice["token_ids"])]
        assert late.result(300) == expected[:1]
    folder.quiet()


# Clients


def test_what_a_client_claims_about_other_servers(folder):
    """No other server has computed these prompts; who says so may wait, others do not."""
    ordinary, _ = folder.saved(4000)
    claims: list[Asked] = [
        {"do_remote_prefill": True}, {"do_remote_decode": True}, {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"},
        {}, {"anything": 1},
    ]  # fmt: skip
    plain = folder.ask([4001 + number for number in range(len(claims))], cache_salt="plain")
    with ThreadPoolExecutor(8) as threads:
        claimed = [
            threads.submit(
                status, folder.server, "/v1/completions",
                request(4001 + number, kv_transfer_params=claim),
            )
            for number, claim in enumerate(claims)
        ]  # fmt: skip
        begin = time.monotonic()
        assert folder.ask([4000]) == [ordinary]
        assert time.monotonic() - begin < 60
        for answer, tokens, claim in zip(claimed, plain, claims, strict=True):
            code, text = answer.result(300)
            assert code in (200, 400), text
            if code == 200 and "do_remote_decode" not in claim:
                assert tokens_of(json.loads(text)) == tokens, claim
    folder.quiet()


def test_one_document_with_other_settings_at_once(folder):
    cases = [
        POINT, POINT | asks(budget=64), POINT | asks("snapkv"), POINT | asks(protect_first=40),
        asks(at=DOCUMENT - 1, interval=0), asks(at=-len(QUESTION), interval=0),
        asks(at=DOCUMENT), asks(at=DOCUMENT + len(QUESTION)), NEVER, {},
    ]  # fmt: skip
    alone = [
        tokens_of(
            folder.server.post("/v1/completions", request(4100, vllm_xargs=x, cache_salt=f"{n}"))
        )
        for n, x in enumerate(cases)
    ]
    assert len({tuple(tokens) for tokens in alone}) >= 5
    for _ in range(2):
        found = post_all(folder.server, [request(4100, vllm_xargs=x) for x in cases])
        assert [tokens_of(answer) for answer in found] == alone
        turn_over(folder.server)


def test_several_answers_and_keys(folder):
    (one,) = folder.ask([4200])
    same = folder.server.post("/v1/completions", request(4200, n=3, **ONE_CHOICE))
    assert [choice["token_ids"] for choice in same["choices"]] == [one] * 3
    for asked in (asks(budget=1), asks("nonsense"), asks(at={"text": "absent"}), asks(at=999)):
        for many in (
            dict(n=3, temperature=1),
            dict(best_of=2),
            dict(n=2, stream=True, temperature=1),
        ):
            code, text = status(
                folder.server, "/v1/completions", request(4200, vllm_xargs=asked, **many)
            )
            assert code == 400 and "kv_eviction" in text, (code, text)


@pytest.mark.parametrize("first", [DOCUMENT + len(QUESTION) + 1, 10**6, 2**31], ids=str)
def test_protecting_more_than_the_prompt_protects_all_of_it(folder, first):
    whole = DOCUMENT + len(QUESTION)
    (expected,) = folder.ask([4300], vllm_xargs=asks(protect_first=whole, budget=64))
    (found,) = folder.ask([4300], vllm_xargs=asks(protect_first=first, budget=64))
    assert found == expected
    hello = dict(messages=[dict(role="user", content="ba")], max_tokens=2)
    chat = chat_body(**hello, vllm_xargs=asks(protect_first=first))
    assert folder.server.post("/v1/chat/completions", chat)["usage"]["completion_tokens"] == 2


BAD = (
    {"kv_eviction_bugdet": 5}, asks("nonsense"), asks(at={"nope": 1}), asks(interval="x"),
    {"kv_eviction_beam_search": 1},
)  # fmt: skip
MESSAGE = [dict(role="user", content="ba na")]
ENDPOINTS: dict[str, Asked] = {
    "/v1/completions": dict(prompt="ba na", max_tokens=2),
    "/v1/chat/completions": dict(messages=MESSAGE, max_tokens=2),
    "/v1/chat/completions/batch": dict(messages=[MESSAGE, MESSAGE], max_tokens=2),
    "/v1/responses": dict(input="ba na", max_output_tokens=2),
    "/v1/messages": dict(messages=MESSAGE, max_tokens=2),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_wrong_keys_are_refused_everywhere(folder, path):
    good = dict(model="tiny") | ENDPOINTS[path]
    assert status(folder.server, path, good)[0] == 200
    for asked in BAD:
        code, text = status(folder.server, path, good | dict(vllm_xargs=asked))
        assert code == 400 and next(iter(asked)) in text, (code, text)


def test_other_endpoints_are_harmless(folder):
    """This server generates only, so these refuse every request."""
    others: dict[str, Asked] = {
        "/v1/embeddings": dict(input="ba"), "/score": dict(text_1="ba", text_2="na"),
        "/pooling": dict(input="ba"), "/classify": dict(input="ba"),
        "/rerank": dict(query="ba", documents=["na"]),
    }  # fmt: skip
    for path, content in others.items():
        code, text = status(folder.server, path, content | dict(model="tiny", vllm_xargs=BAD[0]))
        assert 400 <= code < 500, (path, code, text)


def test_salts_of_any_size_and_number(folder):
    (one,) = folder.ask([4400])
    for salt in ("x" * 128, "\u202e\U0001f600" * 10, "a..b", " "):
        assert folder.ask([4400], cache_salt=salt) == [one]
    # vLLM allows 128 characters, and no slash.
    for salt in ("", 5, ["a"], {"a": 1}, "x" * 10**6, "../a", "\x00"):
        code, text = status(folder.server, "/v1/completions", request(4400, cache_salt=salt))
        assert code == 400, text
    count = size(300, 10_000)
    short = [
        body(random_prompt(60, seed=n), 1, vllm_xargs=asks(at=50), cache_salt=f"salt {n}")
        for n in range(count)
    ]
    resident = sum(p.memory_info().rss for p in group(folder.server))
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda one: folder.server.post("/v1/completions", one), short)
        assert sum(answer["usage"]["completion_tokens"] for answer in answers) == count
    grown = sum(p.memory_info().rss for p in group(folder.server)) - resident
    print(f"\n{count} salts: memory grew by {grown >> 20} MB")
    assert grown < (64 << 20) + 4096 * count
    assert folder.ask([4400]) == [one]
    folder.quiet()


def test_two_hundred_requests_of_one_client_that_leaves(folder):
    """Each with an eviction point and a budget of its own, half of them as streams."""
    other = request(4500)
    expected = tokens_of(folder.server.post("/v1/completions", other))
    sockets = []
    for number in range(200):
        asked = request(
            4501 + number % 20, stream=bool(number % 2),
            vllm_xargs=asks(at=100 + number, budget=64 + number),
        )  # fmt: skip
        data = json.dumps(asked).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        sockets.append(socket.create_connection(("127.0.0.1", folder.server.port)))
        sockets[-1].sendall(head.encode() + data)
    with ThreadPoolExecutor(1) as threads:
        during = threads.submit(folder.server.post, "/v1/completions", other)
        time.sleep(1)
        for each in sockets:
            each.close()
        assert tokens_of(during.result(300)) == expected
    folder.quiet()
    with evictions(folder.server, 1):
        answer = post(folder.server, other["prompt"], vllm_xargs=POINT, cache_salt="fresh")
    assert tokens_of(answer) == expected and cached(answer) == 0


# Adapters


def test_an_adapter_that_is_replaced_finds_no_file_of_the_old_one(folder, tiny_model, tmp_path):
    server, place = folder.server, tmp_path / "adapter"
    (plain,) = folder.ask([4600])
    answers = []
    for seed in (5, 6, 5):
        write_adapter(tiny_model, place, seed)
        call(server, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(place))
        known = folder.files()
        answers.append(folder.ask([4600], model="mine")[0])
        turn_over(server)
        assert folder.ask([4600], model="mine") == answers[-1:]
        assert folder.files() == known, "stores of adapters are not written"
        call(server, "/v1/unload_lora_adapter", lora_name="mine")
        shutil.rmtree(place)
        turn_over(server)
    assert answers[0] == answers[2] != answers[1]
    assert plain not in answers and folder.ask([4600]) == [plain]
