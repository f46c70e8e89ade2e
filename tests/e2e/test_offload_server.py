"""``vllm serve --kv-offloading-size`` over HTTP, on one rank and on two."""

import urllib.request

import pytest

from benchmarks.server import Server
from tests.e2e.test_server import BASE
from tests.e2e.test_stores_server import DOCUMENT, QUESTIONS

NEW_TOKENS = 40
FLAGS = [
    *BASE, "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "128",
    "--kv-eviction-interval", "32", "--kv-offloading-size", "0.25",
    "--enable-prompt-tokens-details", "--max-num-batched-tokens", "256",
]  # fmt: skip
LOADED = len(DOCUMENT) // 32 * 32


def ask(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt's were not computed."""
    answer = server.post(
        "/v1/completions",
        dict(
            model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True,
        ),
    )  # fmt: skip
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def lose(server: Server, host: bool) -> None:
    """The KV cache loses all, and so does host memory if asked."""
    url = f"{server.url}/reset_prefix_cache?reset_external={str(host).lower()}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_next_question_loads_the_document(tiny_model, tmp_path, ranks):
    env = dict(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_OMP_THREADS_BIND="|".join("01"[:ranks]))
    flags = [*FLAGS, "--tensor-parallel-size", str(ranks)]
    with Server(tiny_model, flags, tmp_path / "log", env=env) as server:
        assert ask(server, QUESTIONS[0])[1] == 0
        loaded = {}
        for number, question in enumerate(QUESTIONS, 1):
            lose(server, host=False)
            loaded[number], cached = ask(server, question)
            assert LOADED - 32 <= cached <= LOADED, "not the window before the prompt's end"
            hits = server.metric("vllm:external_prefix_cache_hits_total")
            assert number * (LOADED - 32) <= hits <= number * LOADED
        for number, question in enumerate(QUESTIONS, 1):
            lose(server, host=True)
            assert ask(server, question) == (loaded[number], 0)
        totals = server.evictions()
        assert totals["evictions_prefill"] == 7 and totals["evictions_decode"] >= 7
        # vLLM's own numbers of the copies come through beside ours.
        assert server.metric("vllm:kv_offload_load_bytes_total") > 0
        assert server.metric("vllm_kvevict:evictions_total") >= 14
