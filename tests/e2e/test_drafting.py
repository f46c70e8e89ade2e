"""Layers that draft evict beside those of the model; vLLM 0.32 on the CPU, synchronous.

Every draft that a real drafter makes is the oracle's, over what its layers kept; then right and
wrong drafts stand at every place around an eviction.
"""

import json

import pytest

from tests import forked
from tests.nightly import nightly


def run(script: str, *arguments: object) -> dict[str, int]:
    done = forked.run(f"tests.e2e.{script}", *arguments, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


CACHED = dict(enable_prefix_caching=True)
CHUNKS = dict(max_num_batched_tokens=96, max_num_seqs=8)


CASES = [
    nightly("draft_model", "ada-snapkv", CACHED | CHUNKS),
    ("eagle", "ada-snapkv", CHUNKS),
    nightly("eagle", "ada-defensive", CACHED),
    nightly("eagle3", "snapkv", {}),
    nightly("mtp", "tova", {}),
]


@pytest.mark.parametrize(("method", "policy", "options"), CASES)
def test_drafts_and_tokens_are_those_of_the_oracle(method, policy, options, tmp_path):
    found = run("drafting_script", method, policy, tmp_path, json.dumps(options))
    assert found["agreed"] == found["total"]
    assert found["full_attention_agreed"] < 0.5 * found["total"]
    assert found["evictions_of_a_request"] >= 3
    assert found["layers_that_draft"] == (4 if method == "draft_model" else 1)
    assert found["drafts_right"] == found["drafts"] > 800
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["queries_unlike"] == 0 and found["windows"] == found["kept"]
    assert found["postponed"] == found["blocks_leaked"] == 0
    if method == "draft_model":
        # The model drafts for itself: all its layers keep alike, and only drafts that were made
        # before an eviction, and verified after it, are wrong.
        assert found["kept_alike"] == found["kept"]
        assert found["rejected_far_from_evictions"] == 0


@pytest.mark.parametrize(
    ("method", "eviction"),
    [
        nightly("draft_model", dict(shared_blocks="evict")),
        nightly("eagle", {}),
        nightly("eagle3", {}),
        nightly("mtp", dict(window=8)),
    ],
)
def test_a_crowd_that_shares_prefixes_and_is_preempted(method, eviction, tmp_path):
    found = run("drafting_crowd_script", method, tmp_path, json.dumps(eviction))
    check_crowd(found)
    assert found["full_attention_agreed"] < 0.6 * found["total"]


def check_crowd(found: dict[str, int], exact: float = 1.0) -> None:
    assert found["agreed"] >= exact * found["total"]
    assert found["full_attention_agreed"] < 0.9 * found["total"]
    assert found["preempted"] >= 2 and found["hits"] > 0 and found["in_place"] > 0
    assert found["evictions"] >= 40 and found["inside"] >= 2
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["blocks_leaked"] == 0


SCENES = ("share", "filled", "aborts", "stops", "bfloat16")


@pytest.mark.nightly
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_scenes(method, scene, tmp_path):
    check_scene(run("drafted_scenes_script", method, scene, tmp_path), scene)


def check_scene(found: dict[str, float], scene: str) -> None:
    """Of ``drafted_scenes_script``, where drafts were the drafter's, then right and wrong."""
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["blocks_leaked"] == 0 and found["evictions"] >= 9
    if scene == "aborts":
        assert found["aborted"] >= 30
    else:
        assert found["evictions_of_a_request"] >= 2
    if scene == "bfloat16":
        assert found["agreed"] > 0.9 * found["total"] and found["below"] < 0.2
    elif scene in ("share", "filled"):
        assert found["agreed"] == found["total"] > 400
    if "full_attention_agreed" in found:
        assert found["full_attention_agreed"] < 0.9 * found["total"]
    if scene == "share":
        # Blocks of 32 tokens, beside the window of as many.
        assert found["stores"] == [(n // 4 - 32) // 32 for n in (900, 600)]
