"""MLA: latent caches evict by token. Tokens and survivors are those of transformers."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.server import Server
from tests import forked
from tests.e2e import latent_script as ranked
from tests.e2e.architectures import MaskedArchitecture, architecture
from tests.e2e.test_abort import abort_everywhere
from tests.e2e.test_features import FREE, GRAMMAR, SCHEMA, check_items, check_letters, complete
from tests.e2e.test_prefill_interval import POINTS, SETTINGS, evicted_at
from tests.e2e.test_server import metrics
from tests.e2e.test_tokens import assert_exact
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import Recorder, engine
from tests.oracles.masked import Kept, Life, check_tokens
from tests.profiles import random_profile
from vllm_kvevict.config.config import EvictionConfig

PROMPTS = [random_prompt(n, seed=n) for n in (700, 333, 60)]
EVICTION = dict(budget=128, interval=64)
POLICIES = (
    *("snapkv", "ada-snapkv", "tova", "ada-tova", "streaming-llm"),
    *("scissorhands", "ada-scissorhands", "nacl"),
)
FEW = "snapkv", "ada-tova", "nacl"
WINDOW, BLOCK, POOLED = EvictionConfig(policy="snapkv").window, 16, 7


class LatentOracle(MaskedArchitecture):
    """Also says how much attention the last tokens of a sequence pay to those before them."""

    @torch.inference_mode()
    def attention(self, tokens: list[int], evictions: list[Kept]) -> torch.Tensor:
        """[layers, tokens - WINDOW]: averaged over the last WINDOW queries and all heads.

        Every key is made of its latent entry, as transformers does it.
        """
        n, life = len(tokens), Life(len(tokens), evictions)
        self._masks = [self._mask(index, 0, n, life) for index in range(self._layers)]
        found = self.model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
        self._masks = []
        weights = torch.stack([layer[0, :, -WINDOW:, :-WINDOW] for layer in found.attentions])
        return weights.mean((1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return architecture("DeepseekV2", tmp_path_factory.mktemp("DeepseekV2"))


@pytest.fixture(scope="module")
def oracle(model):
    return LatentOracle(model)


@pytest.mark.parametrize("policies", [FEW, nightly(POLICIES)], ids=["some", "all"])
def test_tokens_of_every_policy(model, oracle, policies):
    settings = dict(policy=policies[0], allow=policies[1:], **EVICTION)
    with engine(model, settings) as run:
        assert run.scheduler.block_size == BLOCK
        free = run.free_blocks()
        for name in policies:
            asked = [{"kv_eviction": name}] * len(PROMPTS)
            outputs = assert_exact(oracle, run, PROMPTS, 150, asked)
            assert [len(lives[0].evictions) for lives in run.lives()] == [3, 3, 1], name
            agreed, total = check_tokens(oracle, PROMPTS[0], outputs[0], [Life(700)])
            assert agreed < total * 0.9, "the oracle could not tell: full attention agrees"
            assert run.free_blocks() == free


def test_what_is_kept_got_most_attention(model, oracle):
    """At the end of prefill and in decode, where earlier evictions have taken their share."""
    with engine(model, dict(policy="snapkv", **EVICTION)) as run:
        outputs = run.generate(PROMPTS, 150)
        compared = 0
        for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
            tokens, evictions = [*prompt, *output], lives[0].evictions
            for index, kept in enumerate(evictions):
                seen = oracle.attention(tokens[: kept.n], evictions[:index])
                for layer, (mine,) in enumerate(kept.positions):
                    earlier = evictions[index - 1] if index else None
                    held = [] if earlier is None else list(earlier.positions[layer][0])
                    held += range(earlier.tail_start if earlier else 0, kept.n - WINDOW)
                    pooled = torch.nn.functional.max_pool1d(
                        seen[layer, held][None], POOLED, stride=1, padding=POOLED // 2
                    )[0]
                    score = dict(zip(held, pooled.tolist(), strict=True))
                    lost = [t for t in held if t < kept.tail_start and t not in set(mine)]
                    assert len(mine) == (128 - WINDOW) // BLOCK * BLOCK and lost
                    assert min(score[t] for t in mine) >= max(score[t] for t in lost) - 1e-7
                    compared += 1
        assert compared == 4 * 7


@pytest.mark.nightly
def test_preemption_and_evictions_in_place(model, oracle):
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400)]
    with engine(
        model,
        dict(policy="snapkv", budget=128, interval=256),
        num_gpu_blocks_override=70,
        max_model_len=1024,
    ) as run:
        assert_exact(oracle, run, prompts, 300)
        assert run.counters.evictions_in_place > 0
        assert any(len(lives) > 1 and lives[-1].evictions for lives in run.lives())
        assert run.free_blocks() == 69


OWN = [
    dict(kv_eviction="ada-pyramid", kv_eviction_interval=32),
    dict(kv_eviction="none"),
    dict(kv_eviction_at=-60, kv_eviction_budget="25%"),
    dict(kv_eviction_interval=0, kv_eviction_budget=96),
    dict(kv_eviction="streaming-llm", kv_eviction_protect_first=48),
    dict(kv_eviction="ada-tova", kv_eviction_at=300, kv_eviction_protect_first=32),
    dict(kv_eviction="ada-pyramid", kv_eviction_at=-20, kv_eviction_interval=0),
    {},
]


GROWING = 6


@pytest.mark.nightly
@pytest.mark.parametrize("threshold", [0, 80], ids=["whole prompts", "in parts"])
def test_settings_of_their_own_in_a_crowd(model, oracle, threshold):
    """Layers in groups, preemption, and prompts that vLLM computes in parts.

    Admissions keep room for what evicts. Of answers that never evict, which begin with one block
    and grow, no forecast knows, and those who came after them are preempted.
    """
    growing = [random_prompt(8 + n, seed=n) for n in range(GROWING)]
    prompts = [random_prompt(n, seed=n) for n in (500, 240, 460, 440, 420, 400, 380, 360)]
    settings = dict(
        policy="snapkv", budget=128, interval=64, allow=[*POLICIES, "ada-pyramid", "none"]
    )
    counts = []
    with engine(
        model,
        settings,
        num_gpu_blocks_override=4 * 60 + 1,
        max_model_len=768,
        long_prefill_token_threshold=threshold,
    ) as run:
        assert len(run.worker.kv_eviction.states) == 4
        free, schedule = run.free_blocks(), run.scheduler.schedule

        def scheduled(*args):
            output = schedule(*args)
            counts.extend(output.num_scheduled_tokens.values())
            return output

        run.scheduler.schedule = scheduled
        assert_exact(oracle, run, growing + prompts, 200, [{"kv_eviction": "none"}] * GROWING + OWN)
        lives = run.lives()[GROWING:]
        assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
        places = [[kept.n for kept in mine[-1].evictions] for mine in lives]
        assert places[1] == [] and places[2][:1] == [400] and places[3] == [440]
        assert places[5][:1] == [300] and places[6] == [360]
        for index, first in ((4, 48), (5, 32)):
            for kept in (kept for life in lives[index] for kept in life.evictions):
                assert all(layer[0][:first] == list(range(first)) for layer in kept.positions)
        # The only request of a step may take all of it.
        assert (max(counts[:200]) <= 80) == bool(threshold)
        assert run.free_blocks() == free


def test_eviction_points_inside_prompts(model, oracle):
    """What follows a point is computed over the store, beside prompts and decoding requests."""
    prompts = [random_prompt(n, seed=n) for n in (720, 333, 200, 60)]
    asked = [{}, {}, {"kv_eviction_at": 100, "kv_eviction_budget": 64}, {}]
    with engine(model, dict(policy="snapkv", **SETTINGS)) as run:
        free = run.free_blocks()
        outputs = assert_exact(oracle, run, prompts, 60, asked)
        assert [points[:-1] for points in evicted_at(run)][:1] == [POINTS]
        assert evicted_at(run)[2][0] == 100
        agreed, total = check_tokens(oracle, prompts[0], outputs[0], [Life(720)])
        assert agreed < total * 0.9, "the oracle could not tell: full attention agrees"
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_a_prompt_that_fills_the_pool(model, oracle):
    """Survivors go into blocks of the prompt, also beside a request that waits for them."""
    prompts = [random_prompt(45 * BLOCK - 100, seed=1), random_prompt(400, seed=2)]
    with engine(
        model,
        dict(policy="snapkv", budget=256, interval=32),
        num_gpu_blocks_override=46,
        max_model_len=45 * BLOCK,
    ) as run:
        pool = run.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(5)
        assert_exact(oracle, run, prompts[:1], 90)
        assert run.counters.evictions_in_place > 0
        assert_exact(oracle, run, prompts[::-1], 90)
        pool.free_blocks(held)
        assert run.free_blocks() == 45


@pytest.mark.nightly
def test_aborts_around_evictions(model):
    """Nothing leaks, and nobody else notices."""
    with engine(model, dict(policy="snapkv", budget=96, interval=32)) as run:
        assert abort_everywhere(run) >= 8


@pytest.mark.nightly
def test_stops_and_grammars(model, oracle):
    grammars = dict(backend="xgrammar", disable_any_whitespace=True)
    with engine(
        model, dict(policy="snapkv", budget=96, interval=32), structured_outputs_config=grammars
    ) as run:
        free, whole = run.free_blocks(), complete(run)[0]
        tokens = list(whole.token_ids)
        words = [word for word in whole.text[len(whole.text) * 2 // 3 :].split() if len(word) > 2]
        stop = next(word for word in words if word.isascii())
        (stopped,) = complete(run, stop=[stop])
        assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.stop_reason == stop
        assert list(stopped.token_ids) == tokens[: len(stopped.token_ids)]
        (stopped,) = complete(run, stop_token_ids=[tokens[70]])
        assert list(stopped.token_ids) == tokens[: tokens.index(tokens[70]) + 1]
        check_letters(run, oracle, complete(run, structured_outputs=GRAMMAR, **FREE)[0])
        check_items(complete(run, structured_outputs=SCHEMA, **FREE)[0])
        assert run.counters.evictions_prefill >= 5 and run.counters.evictions_decode >= 10
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_bfloat16(model):
    """The oracle has the same weights, and numbers of float32."""
    oracle = LatentOracle(model)
    for parameter in oracle.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with engine(model, dict(policy="snapkv", **EVICTION), dtype="bfloat16") as run:
        outputs = run.generate(PROMPTS, 150)
        assert run.generate(PROMPTS, 150) == outputs
        lives = run.lives()
    assert [len(mine[0].evictions) for mine in lives] == [3, 3, 1]
    found = [check_tokens(oracle, *one) for one in zip(PROMPTS, outputs, lives, strict=True)]
    agreed, total = map(sum, zip(*found, strict=True))
    assert agreed > 0.95 * total
    assert check_tokens(oracle, PROMPTS[0], outputs[0], [Life(700)])[0] < 0.6 * 150


@pytest.mark.nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two engines need two cores")
def test_two_engines(tmp_path):
    """Data parallel: tokens are those of one engine. vLLM's CPU build takes no experts there."""
    model = architecture("DeepseekV2", tmp_path / "dense", first_k_dense_replace=4)
    oracle = MaskedArchitecture(model)
    # More of them would wait for each other's evictions.
    prompts = [random_prompt(150 + 11 * n, seed=n) for n in range(4)]
    with engine(model, dict(policy="snapkv", budget=96, interval=32), max_model_len=1024) as run:
        expected = assert_exact(oracle, run, prompts, 70)
        evictions = run.counters.evictions
        assert not run.counters.postponed
    flags = "--enforce-eager --dtype float32 --kv-cache-memory-bytes 64M --max-model-len 1024"
    flags += " --kv-eviction snapkv --kv-eviction-budget 96 --kv-eviction-interval 32"
    flags += " --data-parallel-size 2 --served-model-name tiny"
    asked = dict(temperature=0, max_tokens=70, ignore_eos=True, return_token_ids=True)
    with (
        Server(model, flags.split(), tmp_path / "log", timeout_s=600) as server,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(prompt: list[int]) -> list[int]:
            body = dict(model="tiny", prompt=prompt, **asked)
            return server.post("/v1/completions", body)["choices"][0]["token_ids"]

        assert list(threads.map(ask, prompts)) == expected
        found = [metrics(server, engine=engine)["evictions_total"] for engine in "01"]
    assert sum(found) == evictions and min(found) > 0


def test_layers_with_budgets_of_their_own(model, oracle):
    with engine(model, dict(policy="pyramidkv", budget=192, interval=64)) as run:
        assert len(run.worker.kv_eviction.states) > 1
        assert_exact(oracle, run, PROMPTS, 150)
        stores = {len(layer[0]) for layer in run.lives()[0][0].evictions[0].positions}
        assert len(stores) > 1


@pytest.mark.nightly
def test_query_compression_and_grouped_experts(tmp_path):
    path = architecture("DeepseekV3", tmp_path)
    with engine(path, dict(policy="snapkv", **EVICTION)) as run:
        assert_exact(MaskedArchitecture(path), run, PROMPTS, 150)


@pytest.mark.nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("policy", ["snapkv", "tova", "probe"])
def test_two_ranks(model, policy, tmp_path):
    """Each rank has a cache of its own, and evicts by its own query heads."""
    target = tmp_path / "result"
    words = [model, policy, target]
    if policy == "probe":
        # What a rank's own query heads say decides where entries say nearly the same.
        words.append(random_profile(tmp_path, model, size=576, window=0.2)[0])
    done = forked.run("tests.e2e.latent_script", *words, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = pickle.loads(target.read_bytes())
    assert result["leaked"] == 0
    ranks = []
    for records in result["records"]:
        recorder = Recorder(result["layers"])
        names = sorted({one.eviction.request_id for one in records}, key=lambda n: n.split("-")[0])
        for name, prompt in zip(names, ranked.PROMPTS, strict=True):
            recorder.admitted(name, len(prompt))
        for record in records:
            recorder(record)
        ranks.append([recorder.lives[name][0] for name in names])
    oracle = MaskedArchitecture(model)
    oracle.group = oracle.heads // 2
    lives = zip(*ranks, strict=True)
    apart = 0
    for prompt, output, (first, second) in zip(
        ranked.PROMPTS, result["tokens"], lives, strict=True
    ):
        for one, other in zip(first.evictions, second.evictions, strict=True):
            assert (one.n, one.tail_start) == (other.n, other.tail_start)
            apart += one.positions != other.positions
            one.positions = [a + b for a, b in zip(one.positions, other.positions, strict=True)]
        assert check_tokens(oracle, prompt, output, [first]) == (ranked.NEW_TOKENS,) * 2
    # Where scores are of entries, too, the ranks agree for the most part.
    assert apart >= {"snapkv": 5, "probe": 1, "tova": 0}[policy], apart
    assert apart <= 4 or policy == "snapkv", "tova averages over the ranks"
