"""The share of value norms that defensive keeps beside a survivor is the one it had at first.

The oracle computes every token's values by transformers, under the same per-head masks, and never
evicts them.
"""

import pytest
import torch

from tests.hardware import FP8_CACHE
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens, two_biases, two_biases_fp8

REQUESTS = [
    (500, {}),
    (420, {"kv_eviction_at": 300}),
    (300, {"kv_eviction": "snapkv"}),
    (333, {"kv_eviction": "defensive", "kv_eviction_protect_first": 40}),
]
SNAPKV = 2
PROMPTS = [random_prompt(n, seed=n) for n, _ in REQUESTS]
ASKED = [asked for _, asked in REQUESTS]
NEW_TOKENS = 70


class WatchedModel(MaskedModel):
    """Keeps the values of every layer."""

    def __init__(self, path, attention):
        super().__init__(path, attention)
        self.parts: list[list[torch.Tensor]] = []
        for layer in self.model.model.layers:
            self.parts.append([])
            layer.self_attn.v_proj.register_forward_hook(
                lambda module, args, output, parts=self.parts[-1]: parts.append(output[0])
            )

    def shares(self, tokens, life) -> torch.Tensor:
        """[L, H, n] norm of a token's value in a head over the sum in all heads."""
        for parts in self.parts:
            parts.clear()
        self.predictions(tokens, life)
        values = torch.stack([torch.cat(parts) for parts in self.parts])
        heads = values.unflatten(-1, (self.heads // self.group, -1)).transpose(1, 2)
        norms = heads.double().square().sum(-1).sqrt()
        return norms / norms.sum(1, keepdim=True)


def watch(run):
    """Shares beside the survivors of every eviction [L, S * H * bs], by request."""
    found: dict[str, list[torch.Tensor]] = {}
    worker = run.worker.kv_eviction

    def listener(record):
        state = worker.states[record.group.group_id]
        heads = state.num_heads
        pages = [block * heads + i for block in record.group.store for i in range(heads)]
        values = [worker.token_stats.layer(n)[pages, :, 0].flatten() for n in state.layer_names]
        found.setdefault(record.eviction.request_id, []).append(torch.stack(values))

    worker.listeners.append(listener)
    return found


@pytest.mark.parametrize(
    "dtype", ["auto", pytest.param("fp8", marks=[FP8_CACHE, pytest.mark.nightly])]
)
def test_shares_of_survivors_are_those_of_full_values(tiny_model_kv4, dtype):
    """First and later evictions, an eviction point, protected tokens, beside another policy."""
    attention = two_biases_fp8 if dtype == "fp8" else two_biases
    oracle = WatchedModel(tiny_model_kv4, attention)
    server = dict(policy="ada-defensive", budget=288, interval=32, allow="defensive,snapkv")
    options = dict(max_num_batched_tokens=160, kv_cache_dtype=dtype)
    with engine(tiny_model_kv4, server, **options) as run:
        found = watch(run)
        outputs = run.generate(PROMPTS, NEW_TOKENS, ASKED)
        lives = run.lives()
        assert run.counters.evictions >= 8
    compared = uneven = 0
    for request_id, shares in found.items():
        index = int(request_id.split("-")[0])
        if index == SNAPKV:
            continue
        life, tokens = lives[index][-1], [*PROMPTS[index], *outputs[index][:-1]]
        if dtype == "auto":
            agreed = check_tokens(oracle, PROMPTS[index], outputs[index], lives[index])
            assert agreed == (NEW_TOKENS, NEW_TOKENS)
        expected = oracle.shares(tokens, life)
        for eviction, mine in zip(life.evictions, shares, strict=True):
            for layer, heads in enumerate(eviction.positions):
                wanted = [expected[layer, head, kept] for head, kept in enumerate(heads)]
                tolerance = 0.02 if dtype == "fp8" else 1e-4
                torch.testing.assert_close(
                    mine[layer].double(), torch.cat(wanted), rtol=tolerance, atol=tolerance
                )
                uneven += len({len(kept) for kept in heads}) > 1
            compared += 1
    assert compared >= 7 and uneven
