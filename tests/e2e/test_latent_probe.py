"""Learned scores of a latent cache (MLA): calibrate makes them, and a server evicts by them.

The oracle is transformers' DeepSeek-V3: its latents and the rotary parts of its keys before they
are turned, and its attention, under the same masks.
"""

import gc
import os

import pytest
import torch
from transformers import AutoTokenizer

from tests import forked
from tests.e2e.architectures import MaskedArchitecture, architecture
from tests.e2e.test_tokens import assert_exact
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine, set_aside
from tests.oracles.learned import Seen, check_learned, features, seen_by_window
from tests.oracles.masked import Kept, Life, check_tokens
from tests.profiles import of_layers, random_profile, said
from vllm_kvevict.calibrate import lessons
from vllm_kvevict.calibrate.__main__ import main
from vllm_kvevict.config import probe_weights
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.profile import read

SIZE, LATENT, WINDOW, RECENT = 576, 512, 32, 8
PROMPTS = [random_prompt(n, seed=n) for n in (700, 333, 60, 500, 420)]
ASKED = [{}, {}, {}, {"kv_eviction_at": 300}, {"kv_eviction_protect_first": 40}]
EVICTION = dict(budget=128, interval=64)
PROSE = 0.7
OPTIONS = "--samples 2 --answers 1 --length 500 --block-size 16 --dtype float32".split()
OPTIONS += ["--prose", str(PROSE), "--least-answered", "0"]


class EntriesOracle(MaskedArchitecture):
    """Also says what a cache of entries holds before rotation, and who looked at it."""

    def __init__(self, path):
        super().__init__(path)
        self.seen: dict[str, list[torch.Tensor]] = {}
        for layer in self.model.model.layers:
            for name in ("kv_a_layernorm", "kv_a_proj_with_mqa"):
                getattr(layer.self_attn, name).register_forward_hook(
                    lambda module, args, out, name=name: self.seen.setdefault(name, []).append(out)
                )

    @torch.inference_mode()
    def of(self, tokens: list[int], evictions: list[Kept]) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, n, SIZE] entries, [L, heads, n, n] attention."""
        n, life = len(tokens), Life(len(tokens), evictions)
        self.seen.clear()
        self._masks = [self._mask(index, 0, n, life) for index in range(self._layers)]
        found = self.model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
        self._masks = []
        latents, whole = (torch.cat(self.seen[name]).double() for name in self.seen_names)
        entries = torch.cat([latents, whole[..., LATENT:]], dim=-1)
        return entries, torch.stack([layer[0] for layer in found.attentions]).double()

    seen_names = ("kv_a_layernorm", "kv_a_proj_with_mqa")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return architecture("DeepseekV3", tmp_path_factory.mktemp("DeepseekV3"))


@pytest.fixture(scope="module")
def oracle(model):
    return EntriesOracle(model)


def check_kept(oracle, run, outputs, weights, window, asked=ASKED) -> int:
    """Every eviction keeps what scores best; returns how many were compared, by layer."""
    compared = 0
    for prompt, output, lives, mine in zip(PROMPTS, outputs, run.lives(), asked, strict=True):
        (life,), tokens = lives, [*prompt, *output]
        # By keys alone, and what is joined with a window.
        scored: list[tuple[dict[int, float], dict[int, float]]] = [({}, {}) for _ in weights.keys]
        for index, kept in enumerate(life.evictions):
            context = mine.get("kv_eviction_at", len(prompt))
            share = EVICTION["budget"] / max(kept.n, context)
            # The window of a context that a request names does not know the question.
            in_context = kept.n <= mine.get("kv_eviction_at", 0)
            entries, attention = oracle.of(tokens[: kept.n], life.evictions[:index])
            for layer, heads in enumerate(kept.positions):
                if heads is None:
                    continue  # Its group keeps more than there is so far.
                former = [e for e in life.evictions[:index] if e.positions[layer]]
                held = list(former[-1].positions[layer][0]) if former else []
                begin = former[-1].tail_start if former else 0
                candidates = [*held, *range(begin, kept.tail_start)]
                held += range(begin, kept.n)
                # A token is scored once, when it first may go, with the age that it has then.
                new = range(begin, kept.tail_start)
                x, age = features(entries[layer, list(new)]), kept.n - torch.tensor(new)
                mine_of = of_layers(weights, slice(layer, layer + 1))
                for kind in (0, 1):
                    counts = 0 if in_context else share
                    alone, beside = said(mine_of, counts, x[None, None], age[None, None], kind)
                    scored[layer][kind].update(zip(new, alone[0, 0].tolist(), strict=True))
                joined = window and not in_context
                scores = torch.tensor([scored[layer][joined][t] for t in candidates]).double()
                if joined:
                    rows = attention[layer, :, -WINDOW:, held]
                    columns = max(len(held) - WINDOW, len(candidates))
                    seen = seen_by_window(rows, columns)[: len(candidates)]
                    scores += float(beside) * seen.log()
                score = dict(zip(candidates, scores.tolist(), strict=True))
                first = mine.get("kv_eviction_protect_first", 0)
                assert heads[0][:first] == list(range(first))
                free = [t for t in heads[0] if t >= first]
                lost = set(candidates) - set(heads[0])
                assert free and lost
                assert min(score[t] for t in free) >= max(score[t] for t in lost) - 1e-2
                assert kept.tail_start == (kept.n - RECENT) // 16 * 16 or "at" in str(mine)
                compared += 1
    return compared


@pytest.mark.parametrize(
    ("policy", "window"),
    [
        ("ada-probe", "auto"),
        nightly("probe", "auto"),
        nightly("ada-probe", "none"),
        nightly("probe", "none"),
    ],
)
def test_entries_are_kept_by_what_is_learned_of_them(model, oracle, tmp_path, policy, window):
    path, weights = random_profile(tmp_path, model, size=SIZE)
    settings = dict(policy=policy, profile=str(path), options=dict(probe_window=window))
    with engine(model, settings | EVICTION, long_prefill_token_threshold=160, block_size=16) as run:
        free = run.free_blocks()
        outputs = assert_exact(oracle, run, PROMPTS, 150, ASKED)
        assert check_kept(oracle, run, outputs, weights, window == "auto") >= 4 * 12
        agreed, total = check_tokens(oracle, PROMPTS[0], outputs[0], [Life(700)])
        assert agreed < total * 0.9, "the oracle could not tell: full attention agrees"
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_layers_with_shares_of_their_own(model, oracle, tmp_path):
    """Groups of layers that are not neighbours, preemption, and requests under other policies."""
    shares = dict(layers=(0.4, 1.5, 0.5, 1.6), heads=((1.0,),) * 4)
    path, _ = random_profile(tmp_path, model, size=SIZE, **shares)
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400)]
    settings = dict(policy="probe", profile=str(path), options=dict(groups=2), allow="snapkv")
    with engine(
        model,
        settings | dict(budget=128, interval=256),
        num_gpu_blocks_override=2 * 64 + 1,
        max_model_len=1024,
        block_size=16,
    ) as run:
        assert {tuple(layers) for layers in run.recorder.layers.values()} == {(1, 3), (0, 2)}
        asked = [{}, {"kv_eviction": "snapkv"}] * 3
        assert_exact(oracle, run, prompts, 300, asked)
        lives = run.lives()
        assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
        assert len({len(layer[0]) for layer in lives[0][-1].evictions[0].positions}) > 1
        assert run.free_blocks() == 2 * 64


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    set_aside()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def check_probes(oracle, model, found) -> None:
    tokenizer, paragraphs = AutoTokenizer.from_pretrained(model), lessons.prose()
    cut = len(paragraphs) * 5 // 6
    texts = lessons.lessons(tokenizer, paragraphs[:cut], 2, 500, "learn", varied=True)

    def watch(ids: list[int]) -> Seen:
        entries, attention = oracle.of(ids, [])
        return Seen(entries[:, None], None, attention[:, None])

    check_learned(found, texts, watch, RECENT, WINDOW, PROSE)


@pytest.mark.nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_calibrate_on_two_ranks(model, oracle, tmp_path):
    """Each has the entries, and half of the query heads."""
    path = tmp_path / "profile.json"
    options = [*OPTIONS, "--output", str(path), "-tp", "2"]
    done = forked.run(
        "vllm_kvevict.calibrate", str(model), *options, VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    profile = read(path)
    check_probes(oracle, model, probe_weights.read(profile.probe, profile.model))


@pytest.mark.nightly
def test_calibrate_learns_of_entries_and_auto_serves_it(
    model, oracle, tmp_path, capsys, monkeypatch, own_process
):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert main([str(model), *OPTIONS]) == 0
    said = capsys.readouterr().out
    assert "KL, keys" in said and "KL, joined" in said and "--kv-eviction-profile auto" in said
    (path,) = tmp_path.glob("kv_eviction/profiles/*.json")
    profile = read(path)
    assert profile.policy == "probe" and profile.heads == ((1.0,),) * 4
    for name in ("keys", "joined", "known"):
        assert all(min(profile.quality[name][at]["kl"]) >= 0 for at in ("50.00%", "6.25%"))
    found = probe_weights.read(profile.probe, profile.model)
    assert found.rotated == (True,) * 4 and found.keys.shape == (4, 1, SIZE + 2)

    check_probes(oracle, model, found)

    with engine(model, dict(policy="auto", **EVICTION), block_size=16) as run:
        served = run.llm.llm_engine.vllm_config.additional_config["kv_eviction"]
        assert EvictionConfig.parse(served).policy == "probe"
        asked = [*ASKED[:-1], {}]
        outputs = assert_exact(oracle, run, PROMPTS, 100, asked)
        assert check_kept(oracle, run, outputs, found, True, asked) >= 4 * 8


@pytest.mark.nightly
def test_shares_by_scores(model, tmp_path, own_process):
    path = tmp_path / "shares.json"
    flags = ["--kv-eviction", "snapkv", "--kv-eviction-budget", "25%", "--block-size", "16"]
    options = ["--samples", "2", "--length", "400", "--dtype", "float32", "--output", str(path)]
    assert main([str(model), *options, *flags]) == 0
    shares = read(path)
    assert shares.heads == ((1.0,),) * 4 and len(set(shares.layers)) > 1
    settings = dict(policy="snapkv", budget=256, profile=str(path), options=dict(groups=2))
    with engine(model, settings, block_size=16) as run:
        run.generate(PROMPTS[:1], 20)
        sizes = [len(layer[0]) for layer in run.lives()[0][0].evictions[0].positions]
    order = sorted(range(4), key=lambda layer: shares.layers[layer])
    assert [sizes[layer] for layer in order] == sorted(sizes) and len(set(sizes)) == 2
