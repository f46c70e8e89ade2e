"""Targets through HTTP: what answers say, what is refused, and what an operator sees."""

import pytest

from benchmarks.server import Server
from tests.e2e.test_own_settings import asks
from tests.e2e.test_own_settings_server import refusal
from tests.e2e.test_server import BASE
from tests.models import random_prompt, random_text

PROMPT = random_prompt(500, seed=1)
FLAGS = ["--kv-eviction", "ada-snapkv", "--kv-eviction-interval", "32"]
FLAGS += ["--kv-eviction-allow", "h2o,none", "--kv-eviction-target", "0"]

BAD = [
    (asks(target="little"), "kv_eviction_target: give nats such as 0.03"),
    (asks(target=-1), "kv_eviction_target: give nats such as 0.03"),
    (asks(target=0.1, budget=96), "leave kv_eviction_budget or it away"),
    (asks("h2o", target=0.1), "needs another policy than h2o"),
    (asks("none", target=0.1), "needs a policy, not none"),
    (asks(target=0.1, when="pressure"), "needs kv_eviction_when always"),
]


@pytest.mark.nightly
def test_what_clients_and_operators_see(tiny_model, tmp_path):
    with Server(tiny_model, [*BASE, *FLAGS], tmp_path / "log") as server:
        body = dict(model=server.model, prompt=PROMPT, max_tokens=20, temperature=0,
                    ignore_eos=True, return_token_ids=True)  # fmt: skip

        def ask(asked):
            answer = server.post("/v1/completions", body | dict(vllm_xargs=asked))
            told = (answer["kv_transfer_params"] or {}).get("kv_eviction")
            return answer["choices"][0]["token_ids"], told

        whole, told = ask({})
        assert told == {"kept": "100%"} and ask(asks("none")) == (whole, None)
        chosen, told = ask(asks(target=1000))
        assert told["kept"] == "12.5%" and 0 < told["kl_nats"] < 1000
        assert ask(asks(budget="12.5%")) == (chosen, None)
        chat = dict(model=server.model, max_tokens=8, temperature=0, vllm_xargs=asks(target=1000))
        chat["messages"] = [dict(role="user", content=random_text(400, seed=2))]
        answer = server.post("/v1/chat/completions", chat)
        assert answer["kv_transfer_params"]["kv_eviction"]["kept"] in ("6.25%", "12.5%")
        for asked, message in BAD:
            assert message in refusal(server, "/v1/completions", body | dict(vllm_xargs=asked))
        assert server.metric("vllm_kvevict:target_rungs_total") == 3
        assert server.metric("vllm_kvevict:trials_total") >= 9
        assert server.metric("vllm_kvevict:target_kl_nats_count") == 2
        # A client sees none of the requests that try budgets.
        assert server.metric("vllm:request_success_total") == 5
