"""Models with recurrent layers, token-exact: full attention evicts, states are left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.architectures import MaskedArchitecture, architecture
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, check_tokens

ROOT = Path(__file__).parents[2]
EVICTION = dict(policy="ada-snapkv", budget=128, interval=64)
PROMPTS = [random_prompt(n, seed=n) for n in (500, 333)]
NEW_TOKENS = 120
FAMILIES = ("GraniteMoeHybrid", "FalconH1")
NEAR = ("Apertus", "NemotronH")
"""vLLM's own logits differ from those of transformers, of the last by 0.01, of a spread of 2."""
HEADS_APART = ("Lfm2",)
"""Queries reach the rotary embedding as [tokens, heads, head size]."""
IN_BFLOAT16 = ("Qwen3Next",)
"""vLLM's CPU build has their linear attention in bfloat16 only."""
LONGER = [random_prompt(n, seed=n) for n in (700, 500)]
AT = [{"kv_eviction_at": 401}, {"kv_eviction_at": -50}]


def check(oracle, run, asked=None) -> None:
    before = run.counters.evictions
    outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
    assert run.counters.evictions - before >= len(PROMPTS)
    full = 0
    for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
        agreed, total = check_tokens(oracle, prompt, output, lives)
        assert agreed == total == NEW_TOKENS
        full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
    assert full < 0.95 * len(PROMPTS) * NEW_TOKENS, "full attention would agree as well"


def of_size(name: str):
    marks = () if name == FAMILIES[0] else (pytest.mark.nightly,)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [of_size(name) for name in FAMILIES])
def test_states_are_left_alone(name, tmp_path):
    path = architecture(name, tmp_path)
    with engine(path, EVICTION) as run:
        free = run.free_blocks()
        check(MaskedArchitecture(path), run)
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_under_model_runner_v2(tmp_path):
    """Its metadata do not name the requests. In a process of its own, with Triton interpreted."""
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.hybrid_script", FAMILIES[0], str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert result["state"] == "MambaHybridModelState" and not result["blocks_leaked"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", HEADS_APART)
def test_short_convolutions(name, tmp_path, monkeypatch):
    """vLLM 0.32's CPU kernel turns the first head only of queries that keep their heads apart."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    turn = RotaryEmbedding.forward_cpu

    def turn_all(self, positions, query, key=None):
        turn(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        return query, key

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", turn_all)
    path = architecture(name, tmp_path)
    with engine(path, EVICTION) as run:
        free = run.free_blocks()
        check(MaskedArchitecture(path), run)
        assert run.free_blocks() == free


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEAR)
def test_tokens_but_near_ties(name, tmp_path):
    path = architecture(name, tmp_path)
    with engine(path, EVICTION) as run:
        free = run.free_blocks()
        oracle = MaskedArchitecture(path)
        outputs = run.generate(PROMPTS, NEW_TOKENS)
        assert run.counters.evictions >= len(PROMPTS)
        right = full = 0
        for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
            assert behind(oracle, prompt, output, lives[0]) < 0.02
            right += check_tokens(oracle, prompt, output, lives)[0]
            full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        assert right >= len(PROMPTS) * NEW_TOKENS - 2
        assert full < 0.95 * len(PROMPTS) * NEW_TOKENS, "full attention would agree as well"
        assert run.free_blocks() == free


def behind(oracle, prompt, output, life: Life) -> float:
    """By how much a chosen token's logit was below the oracle's best, at most."""
    logits = oracle.predictions([*prompt, *output][:-1], life)
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


@pytest.mark.nightly
def test_chunks_and_eviction_points(tmp_path):
    path = architecture(FAMILIES[0], tmp_path)
    with engine(path, EVICTION, max_num_batched_tokens=256) as run:
        free = run.free_blocks()
        check(MaskedArchitecture(path), run, AT)
        assert [lives[0].evictions[0].n for lives in run.lives()] == [401, 283]
        assert run.free_blocks() == free


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_linear_attention_and_prefix_caching(name, tmp_path):
    """Chunks end where states are kept, and where a request asks to be evicted.

    Near ties fall as bfloat16 rounds; full attention would agree with far fewer tokens.
    """
    path = architecture(name, tmp_path)
    options = dict(enable_prefix_caching=True, max_num_batched_tokens=256)
    with engine(path, EVICTION, dtype="bfloat16", **options) as run:
        free = run.free_blocks()
        oracle = MaskedArchitecture(path)
        for asked in (None, None, AT):
            before = run.counters.evictions
            outputs = run.generate(LONGER, NEW_TOKENS, asked)
            assert run.counters.evictions - before >= len(LONGER)
            right = full = 0
            for prompt, output, lives in zip(LONGER, outputs, run.lives(), strict=True):
                right += check_tokens(oracle, prompt, output, lives)[0]
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
            assert right > 0.9 * len(LONGER) * NEW_TOKENS > full
            assert run.free_blocks() == free
        assert [lives[0].evictions[0].n for lives in run.lives()] == [401, 450]
