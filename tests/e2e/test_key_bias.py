"""Keys with a large constant part, as the bias of Qwen2 gives them, in stores in few bits: every
greedy token equals transformers' over the same survivors, quantised without that part."""

import shutil

import pytest
import torch

from benchmarks.key_bias import add_key_bias
from tests.models import cached_tiny_llama, random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.oracles.packed import given_back, packed
from vllm_kvevict.worker import centres
from vllm_kvevict.worker.centres import MOST_LOST, keys_lost

NEAR = 0.01
SETTINGS = dict(policy="ada-snapkv", budget=280, interval=64, store_dtype="int4")
NEW_TOKENS = 140
pytestmark = pytest.mark.slow


def biased(folder, norm, **options):
    """A model whose slowest pairs of dimensions turn by less than 0.1 over its longest prompt."""
    source = folder / "plain"
    shutil.copytree(cached_tiny_llama(kv_heads=2), source)
    text = (source / "config.json").read_text().replace("10000.0", "10000000.0")
    assert "10000000.0" in text
    (source / "config.json").write_text(text)
    return add_key_bias(source, folder / "biased", norm, **options)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return biased(tmp_path_factory.mktemp("slow"), 400.0)


def centred_oracle(path) -> MaskedModel:
    """Keys are stored without the mean of the rotated bias over 4,096 positions."""
    oracle = MaskedModel(path, stored=packed(5, 3))
    model = oracle.model.model
    cos, sin = model.rotary_emb(torch.zeros(1, 1), torch.arange(4096)[None])
    for layer in model.layers:
        bias = layer.self_attn.k_proj.bias.view(2, 1, -1)
        half = bias.shape[-1] // 2
        turned = torch.cat([-bias[..., half:], bias[..., :half]], -1)
        mean = (bias * cos + turned * sin).mean(1)[:, None]

        def stored(keys, values, mean=mean):
            return given_back(keys - mean, 5) + mean, given_back(values, 3, values=True)

        layer.self_attn.stored = stored
    return oracle


def agreement(path, oracle) -> tuple[float, float, float]:
    """Shares of tokens that agree with an oracle and with one that quantises nothing, and the
    largest estimate of what is lost."""
    prompts = [random_prompt(n, seed=n) for n in (700, 333)]
    exact, same, total = MaskedModel(path), [0, 0], 0
    with engine(path, SETTINGS, max_num_batched_tokens=256) as run:
        outputs = run.generate(prompts, NEW_TOKENS)
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            assert len(lives[-1].evictions) >= 2
            for index, one in enumerate((oracle, exact)):
                same[index] += check_tokens(one, prompt, output, lives, NEAR)[0]
            total += len(output)
        lost = [
            float(
                keys_lost(run.worker.model_runner.get_model(), run.worker._layer(name), cache).max()
            )
            for name, cache in run.worker.kv_eviction._caches.items()
        ]
    return same[0] / total, same[1] / total, max(lost)


def test_a_large_bias_of_keys_costs_nothing(slow):
    same, near, lost = agreement(slow, centred_oracle(slow))
    assert same == 1.0
    assert near > 0.5 and lost < MOST_LOST


def test_without_centres_the_bias_decides_about_the_levels(slow, monkeypatch):
    """What the test above would find if nothing was subtracted."""
    made = centres.key_centres
    monkeypatch.setattr(
        "vllm_kvevict.worker.cpu.key_centres", lambda *of: torch.zeros_like(made(*of))
    )
    same, near, lost = agreement(slow, MaskedModel(slow, stored=packed(5, 3)))
    assert same > 0.9
    assert near < 0.2 and lost > MOST_LOST


def test_the_start_warns_of_a_bias_that_turns_fast(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(centres.logger, "warning", lambda text, *of: said.append(text % of))
    with engine(biased(tmp_path, 400.0, fast=True), SETTINGS):
        pass
    assert len(said) == 1 and "4 of 4 layers" in said[0]
    assert "set --kv-eviction-store-dtype to auto" in said[0]
