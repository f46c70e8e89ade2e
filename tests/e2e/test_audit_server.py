"""Audits as an operator sees them: flags, histograms, the periodic line; the same answers."""

import subprocess
import sys

from benchmarks.server import Server
from tests.e2e.test_server import BASE, EVICTION
from tests.models import random_prompt
from tests.oracles.engine import engine

PROMPTS = [random_prompt(300 + 40 * seed, seed=seed) for seed in range(4)]
NEW_TOKENS = 60


def answers(server: Server) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        body = dict(
            model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True,
        )  # fmt: skip
        found.append(server.post("/v1/completions", body)["choices"][0]["token_ids"])
    return found


def test_what_an_operator_sees(tiny_model, tmp_path):
    settings = dict(policy="ada-snapkv", budget=96, interval=32, shared_blocks="evict")
    with engine(tiny_model, settings, max_model_len=2048) as run:
        expected = run.generate(PROMPTS, NEW_TOKENS)
    flags = [*BASE, *EVICTION, "--kv-eviction-audit", "100%"]
    log = tmp_path / "audited.log"
    with Server(tiny_model, flags, log) as server:
        assert answers(server) == expected
        evictions = server.metric("vllm_kvevict:evictions_total")
        audited = server.metric("vllm_kvevict:audit_kl_nats_count")
        dropped = server.metric("vllm_kvevict:dropped_audits_total")
        # The last may still be on its way.
        assert evictions >= audited + dropped >= evictions - 1 and audited >= 4
        assert server.metric("vllm_kvevict:audit_kl_nats_sum") > 0
        assert server.metric("vllm_kvevict:audited_tokens_total") >= 32 * audited
        done = subprocess.run(
            [sys.executable, "-m", "vllm_kvevict", "audit", server.url],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "ada-snapkv" in done.stdout, done.stderr
        # A client sees none of the requests that replay.
        assert server.metric("vllm:request_success_total") == len(PROMPTS)
        assert server.metric("vllm:prompt_tokens_total") == sum(map(len, PROMPTS))
