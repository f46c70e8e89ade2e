"""A salt or an adapter is never lost in a tier outside the KV cache.

Users have reported it of connectors that save prompts by their tokens (vllm#53495, sglang#37160,
LMCache#4825): a second tenant found what a first one had computed. Each test asks as the first one,
lets the KV cache lose everything, and asks as the second one.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.test_lora import SERVED, adapter_and_merged
from tests.e2e.test_saved_prompts import saving
from tests.e2e.test_stores import lose
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

__all__ = ["adapter_and_merged"]

PROMPTS = [random_prompt(420, seed=91 + number) for number in range(3)]
NEW_TOKENS = 12
POINT = {"kv_eviction_at": 400}
NEVER = {"kv_eviction": "none"}
SETTINGS = dict(policy="ada-snapkv", budget=96, interval=32, allow="none")
OPTIONS = dict(max_num_batched_tokens=1024, max_model_len=1024, enable_prefix_caching=True)


@dataclass(frozen=True)
class Tier:
    """A tier: its settings, its options, and whether it keeps what a salt has computed for it."""

    settings: dict[str, Any]
    options: dict[str, Any]
    salted: bool


def tier(name: str, folder: Any) -> Tier:
    if name == "ExampleConnector":
        return Tier({}, saving(folder), False)
    if name == "offload":
        return Tier({}, dict(kv_offloading_size=0.25), True)
    if name == "memory":
        return Tier(dict(store_memory="1G"), {}, True)
    return Tier(dict(store_path=str(folder)), {}, True)


@dataclass
class Tenant:
    """Who asks: a salt, an adapter, or neither; ``oracle`` has the weights of its model."""

    oracle: MaskedModel
    salt: str | None = None
    adapter: LoRARequest | None = None

    def ask(self, run: Any, prompt: list[int], asked: dict[str, Any]) -> tuple[list[int], int]:
        """The answer, each token that of the oracle, and how many tokens were found.

        What the KV cache has of earlier tenants is lost before.
        """
        lose(run)
        run.recorder.lives.clear()
        (output,) = run.llm.generate(
            [dict(prompt_token_ids=prompt, **(dict(cache_salt=self.salt) if self.salt else {}))],
            SamplingParams(
                temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, extra_args=dict(asked)
            ),
            lora_request=self.adapter,
            use_tqdm=False,
        )
        tokens = list(output.outputs[0].token_ids)
        (lives,) = run.lives()
        assert check_tokens(self.oracle, prompt, tokens, lives) == (NEW_TOKENS, NEW_TOKENS)
        assert bool(lives[-1].evictions) == (asked != NEVER)
        return tokens, output.num_cached_tokens


@pytest.fixture(scope="module")
def tenants(tiny_model, adapter_and_merged):
    adapter, merged = adapter_and_merged
    base, other = MaskedModel(tiny_model), MaskedModel(merged)
    return [
        Tenant(base, "a"),
        Tenant(base, "b"),
        Tenant(other, None, LoRARequest("mine", 1, str(adapter))),
        Tenant(base),
    ]


def check_separation(
    run: Any, tenants: list[Tenant], prompt: list[int], asked: dict[str, Any], salted: bool
) -> None:
    """The first question of each tenant finds nothing; that the tier works is seen afterwards."""
    answers = []
    for tenant in tenants:
        tokens, cached = tenant.ask(run, prompt, asked)
        assert cached == 0, f"{tenant} found what another one computed"
        answers.append(tokens)
    assert answers[0] == answers[1] == answers[3] != answers[2]
    assert tenants[3].ask(run, prompt, asked)[1] >= 320, "the tier has nothing"
    assert (tenants[0].ask(run, prompt, asked)[1] > 0) == salted


CASES = [
    ("ExampleConnector", [{}, NEVER]),
    ("offload", [{}, POINT, NEVER]),
    # Only what requests share, which is the store at a point, goes to these.
    ("memory", [POINT]),
    ("file", [POINT]),
]


@pytest.mark.parametrize("name, settings", CASES, ids=[name for name, _ in CASES])
def test_a_second_salt_or_adapter_finds_nothing(tiny_model, tenants, tmp_path, name, settings):
    """Whether requests evict or not; each of them reads another prompt."""
    where = tier(name, tmp_path)
    with engine(tiny_model, SETTINGS | where.settings, **OPTIONS | SERVED | where.options) as run:
        free = run.free_blocks()
        for number, asked in enumerate(settings):
            check_separation(run, tenants, PROMPTS[number], asked, where.salted)
        assert run.free_blocks() == free
