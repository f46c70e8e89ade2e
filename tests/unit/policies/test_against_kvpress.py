"""Proof 2: what we keep of a prompt is what kvpress 0.5.5 keeps, per layer and KV head.

How budgets map. A prompt of E tokens with ``E - w`` whole blocks has its tail start at
T = E - w. We keep S * bs of the T candidates and the window, kvpress ``n_kept`` tokens per
head, among them the window, whose scores it sets above all others:

    n_kept = S * bs + w

ObservedAttentionPress keeps no recent tokens, and divides the sums of H2O by the number of queries
that saw a token: h2o without a recent share, on sums divided so, keeps the same.

TOVAPress keeps no window but the last token, so for it w = 1 and the prompt is shorter.

PyramidKVPress counts the window in the budgets it lets fall, we let fall what is beside it. Its
layers run from 2 K - K / beta' to K / beta' for a mean of K tokens, ours from
w + 2 B - B / beta to w + B / beta. They agree where K = B + w and K / beta' = w + B / beta.

AdaKVPress guarantees each head its ``n_safe = int(n_kept * alpha)`` best tokens. The w best
are the window again, so of the candidates a head is sure of ``n_safe - w``; our floor
guarantees ``max(1, int(floor * S))`` pages, here of one token. They agree where

    int(n_kept * alpha) = w + max(1, int(floor * S))
"""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.models import random_prompt
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.policy_options import options_of
from vllm_kvevict.ops.torch.column_sums import column_sums
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import Candidates
from vllm_kvevict.policies.h2o import H2O
from vllm_kvevict.policies.registry import build_policy

ROOT = Path(__file__).parents[3]
ANSWER = "answer "
PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"
WINDOW, STORE_TOKENS = 32, 128
PROMPT = random_prompt(WINDOW + 18 * 32, seed=18)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists() and "CI" not in os.environ,
        reason="kvpress is not installed: run `make setup-kvpress`",
    ),
]


@pytest.fixture(scope="module")
def captured(tiny_model_kv4):
    """Rotated queries [L, H, G, E, D], keys [L, H, E, D] and scale of the prompt's prefill."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers = []

    def recording(module, query, key, value, attention_mask, scaling=None, **kwargs):
        layers.append((query[0], key[0], scaling))
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )

    AttentionInterface.register("kvevict_recording", recording)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_kv4, dtype=torch.float32, attn_implementation="kvevict_recording"
    ).eval()
    with torch.inference_mode():
        model(torch.tensor([PROMPT]), use_cache=False, logits_to_keep=1)
    queries, keys, scales = zip(*layers, strict=True)
    keys = torch.stack(keys)
    assert keys.shape[:2] == (4, 4)
    return torch.stack(queries).unflatten(1, (4, -1)), keys, scales[0]


def kept_by_us(
    captured, policy: str, block_size: int, window: int = WINDOW, **options
) -> list[list[list[int]]]:
    queries, keys, scale = captured
    length = len(PROMPT) - WINDOW + window
    config = EvictionConfig(
        policy=policy,
        budget=STORE_TOKENS + window,
        window=window,
        options=options | (dict(pool="avg") if "pool" in options_of(policy) else {}),
    )
    rule = config.rule(block_size)
    tail_start, store = rule.tail_start(length), rule.store_blocks(length)
    assert (tail_start, store * block_size) == (length - window, STORE_TOKENS)
    chosen = build_policy(config)
    scores = torch.stack(
        [
            chosen.scorer.scores(
                Candidates(
                    keys=layer_keys[:, :length],
                    valid=torch.ones(len(layer_keys), length, dtype=torch.bool),
                    queries=layer_queries[:, :, tail_start:length]
                    if chosen.requirements.window == "required"
                    else None,
                    window=window,
                    num_candidates=tail_start,
                    scale=scale,
                )
            )
            for layer_queries, layer_keys in zip(queries, keys, strict=True)
        ]
    )
    tail = list(range(tail_start, length))
    kept = []
    for layer, rule in zip(scores, config.layer_rules(block_size, len(scores)), strict=True):
        caps = torch.full((1, len(layer)), tail_start // block_size)
        pages = chosen.allocator.pages(layer[None], caps, rule.store_blocks(length), block_size)
        (columns,) = select_tokens(layer[None], pages, block_size)
        heads = columns.split((pages[0] * block_size).tolist())
        kept.append([head.tolist() + tail for head in heads])
    return kept


@pytest.fixture(scope="module")
def kvpress() -> Iterator[subprocess.Popen[str]]:
    """The oracle's process, which is asked a line at a time."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make setup-kvpress`")
    script, pipe = ROOT / "tests" / "oracles" / "kvpress_kept.py", subprocess.PIPE
    with subprocess.Popen([PYTHON, script], stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.fixture
def kept_by_kvpress(kvpress, tiny_model_kv4, tmp_path) -> Callable[..., list[list[list[int]]]]:
    def asked(press: str, window: int = WINDOW, **options: float) -> list[list[list[int]]]:
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(PROMPT[: len(PROMPT) - WINDOW + window]))
        options |= {"keep": STORE_TOKENS + window, "window": window}
        flags = [f"--{name}={value}" for name, value in options.items()]
        kvpress.stdin.write(json.dumps([*map(str, (tiny_model_kv4, tokens, press)), *flags]) + "\n")
        kvpress.stdin.flush()
        for line in kvpress.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError("kvpress ended: what it said is above")

    return asked


@pytest.mark.parametrize("kernel", [5, 1])
def test_snapkv(captured, kept_by_kvpress, kernel):
    theirs = kept_by_kvpress("snapkv", kernel=kernel)
    assert len({tuple(head) for layer in theirs for head in layer}) == 16, "every head differs"
    for block_size in (16, 32):
        assert kept_by_us(captured, "snapkv", block_size, pool_kernel=kernel) == theirs


def test_streaming_llm(captured, kept_by_kvpress):
    theirs = kept_by_kvpress("streaming-llm", sinks=5)
    for block_size in (16, 32):
        assert kept_by_us(captured, "streaming-llm", block_size, sinks=5) == theirs


def test_tova(captured, kept_by_kvpress):
    theirs = kept_by_kvpress("tova", window=1)
    assert all(head == layer[0] for layer in theirs for head in layer), "heads keep the same"
    assert len({tuple(layer[0]) for layer in theirs}) == len(theirs), "every layer differs"
    for block_size in (16, 32):
        assert kept_by_us(captured, "tova", block_size, window=1) == theirs
    apart = kept_by_us(captured, "ada-tova", 16, window=1, floor=1.0)
    assert apart != theirs, "heads apart keep other tokens"


def test_pyramidkv(captured, kept_by_kvpress):
    """Four layers, a group each: 224, 160, 96 and 32 tokens beside the window."""
    theirs = kept_by_kvpress("pyramidkv", beta=2.5)
    assert [{len(head) for head in layer} for layer in theirs] == [{256}, {192}, {128}, {64}]
    settings = dict(pool_kernel=5, groups=4, beta=4.0)
    for block_size in (16, 32):
        assert kept_by_us(captured, "pyramidkv", block_size, **settings) == theirs
    apart = kept_by_us(captured, "ada-pyramid", 16, **settings)
    assert [sum(map(len, layer)) for layer in apart] == [4 * len(layer[0]) for layer in theirs]
    assert apart != theirs, "heads share the layer's budget"


def test_h2o_and_observed_attention(captured, kept_by_kvpress):
    """The sums come in chunks of queries, as from a chunked prefill."""
    theirs = kept_by_kvpress("observed-attention")
    assert len({tuple(head) for layer in theirs for head in layer}) == 16, "every head differs"
    queries, keys, scale = captured
    length = len(PROMPT)
    for layer, (layer_queries, layer_keys) in enumerate(zip(queries, keys, strict=True)):
        heads = len(layer_keys)
        sums = torch.zeros(heads, length)
        for start in range(0, length, 100):
            end = min(length, start + 100)
            chunk, seen = layer_queries[:, :, start:end], torch.full((heads,), end)
            sums[:, :end] += column_sums(chunk, layer_keys[:, :end], seen, scale)
        candidates = Candidates(
            keys=layer_keys,
            valid=torch.ones(heads, length, dtype=torch.bool),
            queries=None,
            window=0,
            num_candidates=length,
            scale=scale,
            keep=STORE_TOKENS + WINDOW,
            accumulated=sums / torch.arange(length, 0, -1),
        )

        def kept(candidates, share: float):
            scores = H2O(share).scores(candidates)[None]
            pages = torch.full(scores.shape[:2], candidates.keep)
            return select_tokens(scores, pages, 1)[0].view(-1, candidates.keep).tolist()

        assert kept(candidates, 0.0) == theirs[layer]
        assert kept(dataclasses.replace(candidates, accumulated=sums), 0.0) != theirs[layer]
        assert kept(candidates, 0.5) != theirs[layer]


@pytest.mark.parametrize("floor", [0.2, 0.9])
def test_ada_snapkv_with_blocks_of_one_token(captured, kept_by_kvpress, floor):
    guaranteed = max(1, int(floor * STORE_TOKENS))
    alpha = (WINDOW + guaranteed + 0.5) / (STORE_TOKENS + WINDOW)
    ours = kept_by_us(captured, "ada-snapkv", 1, pool_kernel=5, floor=floor)
    theirs = kept_by_kvpress("ada-snapkv", kernel=5, floor=alpha)
    counts = [[len(head) - WINDOW for head in layer] for layer in ours]
    assert counts == [[len(head) - WINDOW for head in layer] for layer in theirs]
    assert ours == theirs
    assert all(len(set(layer)) > 1 for layer in counts), "budgets moved between heads"
    if floor == 0.9:
        assert min(map(min, counts)) == guaranteed, "the floor binds somewhere"
