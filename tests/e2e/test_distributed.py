"""Ranks: each evicts the heads and layers that it has, and all hold the same blocks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.e2e.architectures import architecture
from tests.e2e.ranks_script import (
    EVICTION,
    NEW_TOKENS,
    POINT,
    PROMPTS,
    QUESTIONS,
    SHARED,
    SHARING,
)
from tests.e2e.test_audit import listen
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.profiles import random_profile

ROOT = Path(__file__).parents[2]
TENSOR = dict(tensor_parallel_size=2, enforce_eager=True)
# vLLM's CPU platform runs no pipeline stages where nothing is compiled.
STAGES = dict(pipeline_parallel_size=2, compilation_config=dict(mode=3, backend="eager"))
NEED_TWO = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")


def ranks(
    model: Path, eviction: dict[str, Any], options: dict[str, Any], folder: str = ""
) -> dict[str, Any]:
    each = options.get("pipeline_parallel_size", 1) * options.get("tensor_parallel_size", 1) // 2
    asked = json.dumps(eviction), json.dumps(options)
    # Other tests build configurations of models for which vLLM compiles nothing, and says so in
    # the environment.
    environment = dict(
        VLLM_CPU_OMP_THREADS_BIND="|".join("01" * each), VLLM_USE_BREAKABLE_CUDAGRAPH="0"
    )
    words = "tests.e2e.ranks_script", str(model), *asked, folder
    if not options.get("async_scheduling"):
        done = forked.run(*words, **environment)
    else:
        # Triton's interpreter brings Model Runner V2, which async scheduling needs.
        paths = str(ROOT), str(ROOT / "tests" / "triton_cpu")
        environment |= dict(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(paths))
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def compared(
    model: Path, eviction: dict[str, Any], options: dict[str, Any], folder: str = ""
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Tokens of one rank and of more, whose evictions and blocks are those of one; all of more."""
    with engine(model, EVICTION | eviction, max_num_batched_tokens=256) as run:
        alone = run.generate(PROMPTS, NEW_TOKENS)
        counters = run.counters.as_dict()
    result = ranks(model, eviction, options, folder)
    first, second = result["rounds"]
    assert first == second, "also with prefix-cache hits"
    assert result["leaked"] == 0
    for name in ("evictions", "store_blocks_allocated", "tokens_evicted"):
        assert result["counters"][name] == 2 * counters[name] > 0
    assert [len(output) for output in first] == [NEW_TOKENS] * len(PROMPTS)
    return alone, first, result


def check_sharing(model: Path, eviction: dict[str, Any], result: dict[str, Any]) -> None:
    """Questions about one document, of which the first two are the same, on two ranks."""
    tokens, counters = result["point"]["tokens"], result["point"]["counters"]
    assert tokens[0] == tokens[1], "whoever made the store"
    assert counters["stores_published"] == counters["evictions_prefill"] == 1
    assert counters["stores_reused"] == len(QUESTIONS) - 1
    for tier in ("memory", "file") if "memory" in result else ():
        assert result[tier]["tokens"] == result["point"]["tokens"], "each rank gets its own part"
        assert result[tier]["counters"][f"stores_restored_{tier}"] == 1
    if eviction["policy"].startswith("ada-"):
        return
    with engine(model, EVICTION | eviction, max_num_batched_tokens=256) as run:
        assert result["point"]["tokens"] == run.generate(
            QUESTIONS, SHARED, [POINT] * len(QUESTIONS)
        )
        assert run.counters.stores_reused == 0 and run.counters.evictions == len(QUESTIONS)


def check_audits(model: Path, policy: str, result: dict[str, Any]) -> None:
    """Each rank has half of the vocabulary and of the heads; what they find is what one finds."""
    told = sorted(nats for *_, nats, _ in result["audits"])
    assert len(told) == result["counters"]["evictions"] - result["counters"]["audits_dropped"] > 8
    if policy.startswith("ada-"):
        return
    settings = dict(policy=policy, audit="100%", **EVICTION)
    options = dict(enable_prefix_caching=True, disable_log_stats=False, max_num_batched_tokens=256)
    with engine(model, settings, **options) as run:
        alone = listen(run)
        for _ in range(2):
            run.generate(PROMPTS, NEW_TOKENS)
    assert told == pytest.approx(sorted(nats for *_, nats, _ in alone), rel=1e-3)


@NEED_TWO
@pytest.mark.parametrize(
    "policy", [nightly(name) for name in ("snapkv", "ada-snapkv", "tova", "nacl")]
)
def test_two_ranks(tiny_model_kv4, policy, tmp_path):
    alone, together, result = compared(tiny_model_kv4, dict(policy=policy), TENSOR, str(tmp_path))
    if not policy.startswith("ada-"):
        assert together == alone, "a uniform budget does not depend on how heads are split"
    else:
        assert together != alone, "an adaptive one does: two heads share it instead of four"
    check_audits(tiny_model_kv4, policy, result)
    if policy in SHARING:
        check_sharing(tiny_model_kv4, dict(policy=policy), result)


@pytest.mark.nightly
@NEED_TWO
@pytest.mark.parametrize("options", [TENSOR, STAGES], ids=["ranks", "stages"])
def test_stores_in_few_bits(tiny_model_kv4: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each rank quantises its own heads: tokens and stores are as on one, on tensor-parallel ranks
    also those in memory and files, which stages refuse."""
    eviction = dict(policy="snapkv", budget=200, store_dtype="int4")
    folder = str(tmp_path) if options == TENSOR else ""
    alone, together, result = compared(tiny_model_kv4, eviction, options, folder)
    assert together == alone
    with engine(tiny_model_kv4, EVICTION | eviction | dict(store_dtype="auto")) as run:
        assert run.generate(PROMPTS, NEW_TOKENS) != alone, "nothing was quantised"
    check_sharing(tiny_model_kv4, eviction, result)


@pytest.mark.nightly
@NEED_TWO
def test_drafts_on_two_ranks(tiny_model_kv4: Path) -> None:
    """Evictions and tokens are those without drafts on one rank."""
    drafts = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=1)
    options = TENSOR | dict(speculative_config=drafts)
    eviction = dict(policy="snapkv", audit="0%")
    alone, together, result = compared(tiny_model_kv4, eviction, options)
    assert together == alone
    assert result["drafted"] > 200


HEADS = ((1.6, 1.2, 0.8, 0.4), (0.4, 0.8, 1.2, 1.6), (1.0, 0.6, 1.4, 1.0), (0.7, 1.3, 0.7, 1.3))


def in_groups(folder: Path, model: Path, **changes: Any) -> str:
    """A profile whose layers of like share are the first of one stage and the last of the other."""
    return str(random_profile(folder, model, layers=(1.5, 0.5, 0.5, 1.5), **changes)[0])


@pytest.mark.nightly
@NEED_TWO
def test_two_stages(tiny_model_kv4: Path) -> None:
    """Layers alike: all is as on one rank, stores that requests share and audits included."""
    eviction = dict(policy="ada-snapkv")
    alone, together, result = compared(tiny_model_kv4, eviction, STAGES)
    assert together == alone
    check_sharing(tiny_model_kv4, eviction, result)
    check_audits(tiny_model_kv4, "ada-snapkv", result)


@pytest.mark.nightly
@NEED_TWO
def test_stages_share_groups_of_layers(tiny_model_kv4: Path, tmp_path: Path) -> None:
    """Each stage has a layer of both groups, its own heads' shares and its own probes.

    Under Model Runner V2 and async scheduling, with a step more under way than there are stages.
    """
    eviction = dict(policy="probe", audit="0%")
    eviction["profile"] = in_groups(tmp_path, tiny_model_kv4, heads=HEADS)
    options = STAGES | dict(async_scheduling=True)
    alone, together, result = compared(tiny_model_kv4, eviction, options)
    assert together == alone and "Async" in result["scheduler"]
    with engine(tiny_model_kv4, EVICTION | eviction | dict(profile=None, policy="snapkv")) as run:
        run.generate(PROMPTS, NEW_TOKENS)
        alike = run.counters.store_blocks_allocated
    assert result["counters"]["store_blocks_allocated"] > alike, "two groups have two stores"


@pytest.mark.nightly
@NEED_TWO
def test_two_stages_of_two_ranks(tiny_model_kv4: Path, tmp_path: Path) -> None:
    profile = in_groups(tmp_path, tiny_model_kv4, heads=None, policy="snapkv")
    eviction = dict(policy="snapkv", profile=profile)
    alone, together, _ = compared(
        tiny_model_kv4, eviction, TENSOR | STAGES | dict(enforce_eager=False)
    )
    assert together == alone


@pytest.mark.nightly
@NEED_TWO
def test_a_stage_without_a_layer_of_a_group(tmp_path: Path) -> None:
    """vLLM makes groups of two layers: the first and third, whose stage that is, and so on."""
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 2
    model = architecture("Gemma3Text", tmp_path, layer_types=kinds, num_hidden_layers=6)
    eviction = dict(policy="snapkv", audit="0%")
    alone, together, _ = compared(model, eviction, STAGES)
    assert together == alone
