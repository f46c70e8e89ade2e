"""A server that is killed and started again answers the next question about a known document."""

import os
import signal
import time

from benchmarks.server import Server
from tests.e2e.test_server import BASE
from tests.models import random_prompt
from tests.oracles.engine import engine

DOCUMENT = random_prompt(500, seed=1)
QUESTIONS = [DOCUMENT + random_prompt(20 + 13 * i, seed=10 + i) for i in range(3)]
POINT = {"kv_eviction_at": len(DOCUMENT)}
NEW_TOKENS = 40
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=64, shared_blocks="evict")
FLAGS = [
    *BASE, "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "128",
    "--kv-eviction-interval", "64", "--kv-eviction-shared-blocks", "evict",
    "--enable-prompt-tokens-details",
]  # fmt: skip


def ask(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt's were not computed."""
    answer = server.post(
        "/v1/completions",
        dict(
            model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True, vllm_xargs=POINT,
        ),
    )  # fmt: skip
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def test_a_killed_server_computes_only_the_next_question(tiny_model, tmp_path):
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, max_model_len=2048) as run:
        expected = run.generate(QUESTIONS, NEW_TOKENS, [POINT] * len(QUESTIONS))
    folder = tmp_path / "stores"
    flags = [*FLAGS, "--kv-eviction-store-path", f"{folder},max=1G"]
    with Server(tiny_model, flags, tmp_path / "first.log") as server:
        assert ask(server, QUESTIONS[0]) == (expected[0], 0)
        deadline = time.monotonic() + 30
        while not list(folder.glob("*/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(server.process.pid, signal.SIGKILL)
    with Server(tiny_model, flags, tmp_path / "second.log") as server:
        for question, tokens in list(zip(QUESTIONS, expected, strict=True))[1:]:
            assert ask(server, question) == (tokens, len(DOCUMENT))
        assert server.metric("vllm_kvevict:restored_stores_total") == 1
        assert server.metric("vllm_kvevict:restored_tokens_total") == len(DOCUMENT)
        assert server.metric("vllm_kvevict:refused_store_files_total") == 0
