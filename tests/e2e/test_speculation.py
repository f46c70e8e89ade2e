"""Drafts that are accepted and rejected around evictions change no token.

The n-gram proposer brings numba, beside which vLLM 0.32 starts no second engine in one process.
"""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.test_drafting import SCENES, check_crowd, check_scene, run
from tests.e2e.test_fp8_tokens import AGREEING
from tests.hardware import FP8_CACHE
from tests.nightly import nightly
from tests.versions import MEDUSA

ROOT = Path(__file__).parents[2]
SUFFIX = ROOT / ".cache" / "suffix"
"""Arctic Inference's suffix trees, which vLLM asks for and leaves to install."""


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        nightly("ngram", "ada-snapkv"),
        nightly("ngram", "pyramidkv"),
        nightly("ngram", "h2o"),
        pytest.param("medusa", "ada-snapkv", marks=[pytest.mark.nightly, MEDUSA]),
        pytest.param("medusa", "ada-defensive", marks=[pytest.mark.nightly, MEDUSA]),
        nightly("suffix", "ada-snapkv"),
        nightly("suffix", "h2o"),
    ],
)
def test_tokens_and_evictions_are_those_without_drafts(
    method, policy, tiny_model, tmp_path, monkeypatch
):
    """Each place around an eviction sees a right draft and a wrong one."""
    if method == "suffix":
        if not SUFFIX.is_dir():
            pytest.skip("Arctic Inference is not here: run `make architectures`")
        monkeypatch.setenv("PYTHONPATH", str(SUFFIX), prepend=os.pathsep)
    check(run("speculation_script", tiny_model, method, policy, tmp_path), method)


@pytest.mark.nightly
def test_n_grams_under_model_runner_v2(tiny_model, tmp_path, monkeypatch):
    """V2 drafts in a kernel of its own, here under Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "triton_cpu"), prepend=os.pathsep)
    found = run("speculation_script", tiny_model, "ngram", "ada-snapkv", tmp_path)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    check(found, "ngram")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        nightly("ngram", {}),
        pytest.param("medusa", {}, marks=[pytest.mark.nightly, MEDUSA]),
        nightly("ngram", dict(store_memory="1G", shared_blocks="evict")),
        pytest.param("medusa", dict(store_path="stores"), marks=[pytest.mark.nightly, MEDUSA]),
        pytest.param("ngram", dict(fp8=True), marks=[pytest.mark.nightly, FP8_CACHE]),
    ],
)
def test_a_crowd_that_shares_prefixes_and_is_preempted(method, more, tiny_model, tmp_path):
    """Prompts in parts of 96 tokens, settings of their own, points inside prompts."""
    if "store_path" in more:
        more = more | dict(store_path=str(tmp_path / more["store_path"]))
    found = run("speculation_crowd_script", tiny_model, method, tmp_path, json.dumps(more))
    check_crowd(found, AGREEING if "fp8" in more else 1.0)
    assert bool(found["restored"]) == ("store_memory" in more or "store_path" in more)


@pytest.mark.nightly
@pytest.mark.parametrize("scene", SCENES)
def test_scenes(scene, tmp_path):
    check_scene(run("drafted_scenes_script", "ngram", scene, tmp_path), scene)


def check(found, method):
    assert found["agreed"] == found["total"]
    assert found["full_attention_agreed"] < 0.9 * found["total"]
    assert found["evictions_of_a_request"] >= 3
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["postponed"] == found["blocks_leaked"] == 0
    drafted, accepted = found["its_own"]
    if method == "medusa":
        # What the heads said is what they say of transformers' states.
        assert found["heads_right"] == found["heads"] > 500
        assert drafted > 500
    if method == "suffix":
        # It has seen the answers: earlier requests gave them.
        assert accepted > 0.8 * drafted > 0
