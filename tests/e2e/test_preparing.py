"""Requests whose context was read by a text say what they say over those survivors alone."""

from dataclasses import replace

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

DOCUMENT = random_prompt(500, seed=1)
PROMPTS = [DOCUMENT + random_prompt(20 + 13 * i, seed=10 + i) for i in range(3)]
PROXY = random_prompt(50, seed=99)
AT = {"kv_eviction_at": len(DOCUMENT), "kv_eviction_interval": 0}
NEW_TOKENS = 40
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024, enable_prefix_caching=True)
WINDOW = 32

CASES = {
    "snapkv": dict(policy="snapkv", budget=128, options=dict(pool_kernel=1)),
    "two groups": dict(policy="pyramidkv", budget=160, options=dict(pool_kernel=1, groups=2)),
}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@torch.inference_mode()
def best(oracle, layer: int, count: int) -> list[list[int]]:
    """The ``count`` tokens before the tail to which the proxy's last queries attend most."""
    tail_start = (len(DOCUMENT) - WINDOW) // 32 * 32
    attention = oracle.model.model.layers[layer].self_attn
    seen: dict[str, torch.Tensor] = {}

    def look(module, args, kwargs):
        seen["hidden"], seen["rotary"] = kwargs["hidden_states"], kwargs["position_embeddings"]

    hook = attention.register_forward_pre_hook(look, with_kwargs=True)
    oracle.model(torch.tensor([DOCUMENT + PROXY]))
    hook.remove()
    cos, sin = seen["rotary"]

    def rotated(projection):
        x = projection(seen["hidden"])[0].unflatten(1, (-1, attention.head_dim)).transpose(0, 1)
        half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
        return x * cos[0] + half * sin[0]

    keys = rotated(attention.k_proj)
    queries = rotated(attention.q_proj).unflatten(0, (len(keys), -1))
    found, n = [], len(DOCUMENT + PROXY)
    for key, group in zip(keys, queries, strict=True):
        total = torch.zeros(n)
        for query in group:
            for position in range(n - WINDOW, n):
                logits = (key[: position + 1] @ query[position]) * attention.scaling
                total[: position + 1] += logits.softmax(0)
        found.append(sorted(total[:tail_start].topk(count).indices.tolist()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_queries_of_the_text_choose_and_nothing_of_it_stays(tiny_model, oracle, case):
    asked = [AT | {"kv_eviction_prepare": PROXY}] * len(PROMPTS)
    with engine(tiny_model, CASES[case], **OPTIONS) as run:
        free = run.free_blocks()
        outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
        counters = run.counters
        assert (counters.preparations, counters.preparations_failed) == (1, 0)
        assert counters.evictions_prefill == 1 and counters.stores_reused == len(PROMPTS)
        assert run.free_blocks() == free
        lives = dict(run.recorder.lives)
        (name,) = [name for name in lives if "-prepare-" in name]
        (made,) = lives.pop(name)[0].evictions
        alone = run.generate(PROMPTS[:1], NEW_TOKENS, [AT])
        assert alone[0] != outputs[0], "the text changes nothing"
    assert (made.n, made.tail_start) == (len(DOCUMENT + PROXY), (len(DOCUMENT) - WINDOW) // 32 * 32)
    for layer, positions in enumerate(made.positions):
        expected = best(oracle, layer, len(positions[0]))
        same = sum(len({*a} & {*b}) for a, b in zip(positions, expected, strict=True))
        assert same >= sum(map(len, expected)) - 2, "ties aside"
    kept = replace(made, n=len(DOCUMENT))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        life = Life(len(prompt), [kept])
        assert check_tokens(oracle, prompt, output, [life]) == (NEW_TOKENS, NEW_TOKENS)


def test_a_text_becomes_tokens_and_an_unfit_one_is_refused(tiny_model):
    with engine(tiny_model, dict(policy="snapkv", budget=128, allow="nacl"), **OPTIONS) as run:
        tokenizer = run.llm.get_tokenizer()
        text = tokenizer.decode(PROXY)
        mine = tokenizer.encode(text, add_special_tokens=False)
        as_text = run.generate(PROMPTS[:1], 8, [AT | {"kv_eviction_prepare": text}])
        as_ids = run.generate(PROMPTS[:1], 8, [AT | {"kv_eviction_prepare": mine}])
        assert as_text == as_ids
        assert run.counters.preparations == 1 and run.counters.stores_reused == 2
        for unfit, sentence in (
            ({"kv_eviction_prepare": [1] * 800}, "800 tokens long.*room for 1 to 522"),
            ({"kv_eviction_prepare": text, "kv_eviction": "nacl"}, "snapkv.*, not nacl"),
        ):
            with pytest.raises(ValueError, match=sentence):
                run.generate(PROMPTS[:1], 8, [AT | unfit])
