"""What probe keeps beside a token is what the probe says of its key before rotation.

The oracle computes every token's keys and values by transformers under the same per-head masks,
turns them back by transformers' rotary embedding, and never evicts them.
"""

from collections import defaultdict

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.hardware import FP8_CACHE
from tests.models import random_prompt
from tests.nightly import covering
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens, cut_to_fp8, two_biases
from tests.profiles import of_layers, random_profile, said, said_by_network

REQUESTS = [
    (500, {}),
    (420, {"kv_eviction_at": 300}),
    (300, {"kv_eviction": "snapkv"}),
    (333, {"kv_eviction": "probe", "kv_eviction_protect_first": 40}),
    (410, {"kv_eviction_budget": "15%"}),
]
BUDGET = 288
SNAPKV = 2
PROMPTS = [random_prompt(n, seed=n) for n, _ in REQUESTS]
ASKED = [asked for _, asked in REQUESTS]
NEW_TOKENS = 70


class WatchedModel(MaskedModel):
    """Keeps what the cache holds of the keys and values of every layer."""

    def __init__(self, path, fp8):
        self.parts = defaultdict(list)

        def watched(module, query, key, value, *args, **kwargs):
            if fp8:
                key, value = cut_to_fp8(key), cut_to_fp8(value)
            new = query.shape[2]
            self.parts[module.layer_idx].append((key[0, :, -new:], value[0, :, -new:]))
            return two_biases(module, query, key, value, *args, **kwargs)

        super().__init__(path, watched)

    def before_rotation(self, keys):
        """[L, H, n, D] keys, turned back by transformers' own rotation by the opposite angle."""
        cos, sin = self.model.model.rotary_emb(keys, torch.arange(keys.shape[2])[None])
        return apply_rotary_pos_emb(keys, keys, cos, -sin)[1]

    def scores(self, tokens, life, weights, share, context_end) -> torch.Tensor:
        """[L, H, n, 2] what the probes say of a key alone, and with the share of the values.

        Up to ``context_end`` the request names a context, in which prose counts nothing.
        """
        self.parts.clear()
        self.predictions(tokens, life)
        layers = [
            [torch.cat(part, 1) for part in zip(*parts, strict=True)]
            for parts in self.parts.values()
        ]
        keys, values = (torch.stack(part) for part in zip(*layers, strict=True))
        keys, values = self.before_rotation(keys).double(), values.double()
        features = [
            keys,
            keys.square().sum(-1, keepdim=True).sqrt(),
            torch.ones(*keys.shape[:3], 1),
        ]
        features = torch.cat(features, -1)
        norms = values.square().sum(-1).sqrt()
        shares = (norms / norms.sum(1, keepdim=True)).clamp(min=1e-6).log()
        found = torch.zeros(*shares.shape, 2).double()
        for layer in range(len(found)):
            # Tokens are scored when they first may go, with the ages that they have then.
            begin, one = 0, slice(layer, layer + 1)
            for eviction in [e for e in life.evictions if e.positions[layer] is not None]:
                new = slice(begin, eviction.tail_start)
                ages = eviction.n - torch.arange(new.start, new.stop)[None, None]
                counts = 0 if eviction.n <= context_end else share
                for kind in (0, 1):
                    alone, window = said(
                        of_layers(weights, one), counts, features[one, :, new], ages, kind
                    )
                    beside = window[..., None] * shares[one, :, new] if kind else 0
                    mine = of_layers(weights, one)
                    alone = alone + said_by_network(
                        mine, features[one, :, new], shares[one, :, new]
                    )
                    found[one, :, new, kind] = alone + beside
                begin = eviction.tail_start
        return found


def watch(run):
    """Numbers beside the survivors [S * H * bs, C] of every eviction, by request and layer."""
    found: dict[str, list[dict[int, torch.Tensor]]] = {}
    last: list[object] = [None]
    worker = run.worker.kv_eviction

    def listener(record):
        state, evictions = (
            worker.states[record.group.group_id],
            found.setdefault(record.eviction.request_id, []),
        )
        if record.eviction is not last[0]:
            evictions.append({})
            last[0] = record.eviction
        heads = state.num_heads
        pages = [block * heads + i for block in record.group.store for i in range(heads)]
        layers = run.recorder.layers[record.group.group_id]
        for layer, name in zip(layers, state.layer_names, strict=True):
            evictions[-1][layer] = worker.token_stats.layer(name)[pages].flatten(0, 1)

    worker.listeners.append(listener)
    return found


@pytest.mark.parametrize(
    ("dtype", "window", "channels", "units"),
    covering(
        ["auto", pytest.param("fp8", marks=FP8_CACHE)],
        [pytest.param("auto", 2), pytest.param("none", 1)],
        [pytest.param(5, id="network"), pytest.param(0, id="linear")],
    ),
)
def test_scores_beside_survivors_are_those_of_keys_before_rotation(
    tiny_model_kv4, tmp_path, dtype, window, channels, units
):
    """First and later evictions, an eviction point, protected tokens, beside another policy."""
    path, weights = random_profile(tmp_path, tiny_model_kv4, units=units)
    oracle = WatchedModel(tiny_model_kv4, dtype == "fp8")
    server = dict(policy="ada-probe", budget=BUDGET, interval=32, allow="probe,snapkv")
    server |= dict(profile=str(path), options=dict(probe_window=window))
    options = dict(max_num_batched_tokens=160, kv_cache_dtype=dtype)
    with engine(tiny_model_kv4, server, **options) as run:
        found = watch(run)
        outputs = run.generate(PROMPTS, NEW_TOKENS, ASKED)
        lives = run.lives()
        assert run.counters.evictions >= 8
    compared = uneven = 0
    for request_id, kept in found.items():
        index = int(request_id.split("-")[0])
        if index == SNAPKV:
            continue
        life, tokens = lives[index][-1], [*PROMPTS[index], *outputs[index][:-1]]
        if dtype == "auto":
            agreed = check_tokens(oracle, PROMPTS[index], outputs[index], lives[index])
            assert agreed == (NEW_TOKENS, NEW_TOKENS)
        own = ASKED[index].get("kv_eviction_budget", "")
        # The others keep more than a quarter.
        share = float(own[:-1]) / 100 if own else BUDGET / len(tokens)
        context_end = ASKED[index].get("kv_eviction_at", 0)
        expected = oracle.scores(tokens, life, weights, share, context_end)
        for eviction, beside in zip(life.evictions, kept, strict=True):
            for layer, heads in enumerate(eviction.positions):
                if heads is None:
                    continue  # Its group keeps more than there is so far.
                wanted = [expected[layer, head, mine] for head, mine in enumerate(heads)]
                same = torch.isclose(
                    beside[layer].double(), torch.cat(wanted)[:, :channels], rtol=1e-2, atol=5e-2
                )
                # A number next to a step of FP8 may be cut to either side, in one of hundreds.
                assert same.double().mean() >= (0.97 if dtype == "fp8" else 1)
                uneven += len({len(mine) for mine in heads}) > 1
            compared += 1
    assert compared >= 7 and uneven
