"""Two servers on one folder and the proxy of deploy/: one computes prompts, the other answers."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from benchmarks.server import Server, free_port
from tests.e2e.test_handover import NEW_TOKENS, POINT, PROMPTS
from tests.e2e.test_server import BASE
from tests.e2e.test_sharing import SETTINGS
from tests.models import random_text
from tests.oracles.engine import engine

pytestmark = pytest.mark.nightly

PROXY = Path(__file__).parents[2] / "deploy" / "prefill_decode.py"
FLAGS = [
    *BASE, "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "128",
    "--kv-eviction-interval", "64", "--kv-eviction-shared-blocks", "evict",
]  # fmt: skip
GREEDY = dict(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@contextmanager
def proxy(prefill: str, decode: str, *flags: str):
    port = free_port()
    command = [sys.executable, str(PROXY), "--prefill", prefill, "--decode", decode, *flags]
    process = subprocess.Popen([*command, "--port", str(port)])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(url, timeout=2)
            except HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def ask(url, path, **body):
    request = urllib.request.Request(
        url + path, json.dumps(GREEDY | body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_two_servers_say_what_one_says(tiny_model, tmp_path):
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, max_model_len=2048) as run:
        expected = run.generate(PROMPTS, NEW_TOKENS, [POINT] * len(PROMPTS))
    flags = [*FLAGS, "--kv-eviction-store-path", f"{tmp_path / 'stores'},max=1G"]
    with (
        Server(tiny_model, flags, tmp_path / "prefill.log") as prefill,
        Server(tiny_model, flags, tmp_path / "decode.log") as decode,
        proxy(prefill.url, decode.url, "--stores") as url,
    ):
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True), 1):
            asked = dict(prompt=prompt, return_token_ids=True)
            answer = json.loads(ask(url, "/v1/completions", **asked))
            assert answer["choices"][0]["token_ids"] == tokens
            assert decode.metric("vllm_kvevict:restored_stores_total") == number
        points = sum(len(prompt) - 1 for prompt in PROMPTS)
        assert decode.metric("vllm_kvevict:restored_tokens_total") == points
        assert decode.metric("vllm_kvevict:reused_tokens_total") == points
        assert decode.metric("vllm_kvevict:restored_seconds_total") > 0
        assert decode.evictions()["evictions_prefill"] == 0
        assert prefill.evictions()["evictions_prefill"] == len(PROMPTS)
        files = (tmp_path / "stores").glob("*/*.safetensors")
        stored = decode.metric("vllm_kvevict:restored_bytes_total")
        assert 0 < stored < sum(file.stat().st_size for file in files)

        chat = dict(messages=[dict(role="user", content=random_text(200, seed=3))], stream=True)
        events = ask(url, "/v1/chat/completions", **chat).split("\n\n")
        deltas = [json.loads(event[6:])["choices"][0] for event in events if "delta" in event]
        streamed = "".join(delta["delta"].get("content") or "" for delta in deltas)
        whole = ask(
            decode.url, "/v1/chat/completions", **chat | dict(stream=False), vllm_xargs=POINT
        )
        assert streamed == json.loads(whole)["choices"][0]["message"]["content"]
        assert decode.metric("vllm_kvevict:restored_stores_total") == len(PROMPTS) + 1
        with pytest.raises(HTTPError, match="400"):
            ask(url, "/v1/completions", prompt=PROMPTS[0], vllm_xargs=dict(kv_eviction="other"))

        prefill.stop()
        answer = json.loads(ask(url, "/v1/completions", prompt=[5, *PROMPTS[0]]))
        assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        assert decode.metric("vllm_kvevict:restored_stores_total") == len(PROMPTS) + 1
