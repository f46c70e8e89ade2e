"""``vllm-kvevict calibrate`` on a tiny model, and a server of its file."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm.engine.arg_utils import EngineArgs

from tests import forked
from tests.models import cached_tiny_llama, random_prompt, random_text
from tests.oracles.engine import engine, set_aside
from tests.oracles.learned import Seen, check_learned, features
from tests.oracles.masked import Kept, Life, MaskedModel
from tests.profiles import said, said_by_network
from vllm_kvevict.calibrate import learn, lessons, network
from vllm_kvevict.calibrate.__main__ import main
from vllm_kvevict.calibrate.local_engine import sized, start
from vllm_kvevict.calibrate.rank import kept
from vllm_kvevict.config import probe_weights
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving import calibrate
from vllm_kvevict.serving.profile import read

PROSE = 0.7


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="module", autouse=True)
def without_former_engines() -> None:
    set_aside()


def test_the_shares_are_those_of_the_scores(tiny_model_kv4, tmp_path: Path, capsys) -> None:
    """Of one prompt, beside the scores of the very same eviction; then a server keeps by them."""
    text, path = random_text(400, seed=3), tmp_path / "shares.json"
    (tmp_path / "prompts.jsonl").write_text(json.dumps(text))
    options = ["--output", str(path), "--prompts", str(tmp_path / "prompts.jsonl")]
    flags = ["--kv-eviction", "ada-snapkv", "--dtype", "float32", "--block-size", "32"]
    flags += ["--kv-eviction-budget", "25%"]
    assert main([str(tiny_model_kv4), *options, *flags]) == 0
    assert str(path) in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["policy"], found["budget"]) == ("ada-snapkv", "25%")

    records = []
    eviction = dict(policy="ada-snapkv", budget="25%")
    with engine(tiny_model_kv4, eviction, max_model_len=1024) as run:
        ids = run.llm.get_tokenizer()(text)["input_ids"]
        run.worker.kv_eviction.listeners.append(records.append)
        run.generate([ids], 2)
    (record,) = records
    counts = kept(record.scores, int(len(ids) * 0.25) - 32).double()
    expected = counts.mean(1) / counts.mean()
    assert found["layers"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found["heads"][1] == pytest.approx((counts[1] / counts[1].mean()).tolist(), abs=1e-4)

    served = dict(policy="ada-snapkv", budget=288, profile=str(path), options=dict(groups=2))
    with engine(tiny_model_kv4, served, max_model_len=2048) as run:
        run.generate([random_prompt(1200, seed=1)], 3)
        assert run.counters.evictions == 1
        sizes = [sum(map(len, layer)) for layer in run.lives()[0][-1].evictions[0].positions]
    assert sum(sizes) == 4 * 4 * 256, "what four layers of four heads keep at 8 blocks"
    order = sorted(range(4), key=lambda layer: found["layers"][layer])
    assert [sizes[layer] for layer in order] == sorted(sizes)


class Watched:
    """Keys before rotation, norms of values and attention of every layer, by transformers."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.seen: dict[str, list[torch.Tensor]] = {}
        for layer in self.model.model.layers:
            for name in ("k_proj", "v_proj"):
                getattr(layer.self_attn, name).register_forward_hook(
                    lambda module, args, output, name=name: self.seen[name].append(output[0])
                )

    @torch.inference_mode()
    def of(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[L, H, n, D] keys and values, [L, H, G, n, n] attention."""
        self.seen = {"k_proj": [], "v_proj": []}
        out = self.model(torch.tensor([ids]), output_attentions=True)
        heads = self.model.config.num_key_value_heads
        keys, values = (
            torch.stack(parts).unflatten(-1, (heads, -1)).transpose(1, 2).double()
            for parts in self.seen.values()
        )
        attention = torch.stack([one[0] for one in out.attentions]).double()
        return keys, values, attention.unflatten(1, (heads, -1))


def test_probes_are_the_least_squares_of_what_is_asked_later(
    tiny_model_kv4, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(network, "STEPS", 100)
    path = tmp_path / "profile.json"
    options = ["--output", str(path), "--samples", "2", "--answers", "1", "--length", "500"]
    options += ["--prose", str(PROSE), "--least-answered", "0"]
    assert main([str(tiny_model_kv4), *options, "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "KL, keys" in said and "KL, joined" in said and f"--kv-eviction-profile {path}" in said
    profile = read(path)
    assert profile.policy == "probe" and profile.heads is not None
    assert profile.quality["full"] == [0, 0, pytest.approx(0.074, abs=1e-3)], "of 48 answers"
    for name, answers in (("keys", 56), ("joined", 56), ("known", 16)):
        row = dict(profile.quality[name])
        assert row.pop("answers") == answers
        assert list(row) == ["50.00%", "25.00%", "12.50%", "6.25%"]
        assert all(0 <= low <= kl <= high for kl, low, high in (one["kl"] for one in row.values()))
    found = probe_weights.read(profile.probe, profile.model)
    assert found.rotated == (True,) * 4 and found.prose.age.any()

    tokenizer, paragraphs = AutoTokenizer.from_pretrained(tiny_model_kv4), lessons.prose()
    cut = len(paragraphs) * 5 // 6
    texts = lessons.lessons(tokenizer, paragraphs[:cut], 2, 500, "learn", varied=True)
    watched = Watched(tiny_model_kv4)
    check_learned(found, texts, lambda ids: Seen(*watched.of(ids)), 8, 32, PROSE)
    assert not list(tmp_path.glob("tmp*")), "a draft is left"


def test_what_is_lost_is_what_masks_lose(tiny_model_kv4, monkeypatch):
    """By scores of networks, which are those that the profile has."""
    monkeypatch.setattr(network, "STEPS", 200)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_kv4)
    (lesson,) = lessons.lessons(tokenizer, lessons.prose(), 1, 500, "test")
    context, later = lesson.context, lesson.later[0]
    n, window, recent = len(context), 32, 8
    args = EngineArgs(model=str(tiny_model_kv4), dtype="float32")
    llm = start(sized(learn.extended(args), n + len(later.ids) + 1))
    try:
        model = learn.Model(llm, window, recent, kv_heads=4)
        # What a random model attends to carries over to no other text.
        model.learn(lesson, held=False)
        model.learn(lesson, held=True)
        judged = model.judge()
        weights = model.solve(PROSE)
        linear, trained = model.losses
        assert trained < linear and judged == pytest.approx(trained)
        model.use(0.25, n)
        model.hold(context)
        by_keys = model.scores(joined=False).double()
        scores = model.scores(joined=True)
        trials = torch.randint(20, n - recent, (2, *scores.shape[:2])).tolist()
        answers, right = (one.tolist() for one in model.lost(later.ids, later.answer, trials))
        whole = model.lost(later.ids, later.answer, [])
        assert len(whole[0]) == 0 and whole[1].tolist() == right[:1]
        # What the model itself goes on with is right.
        own, greedy = later.ids[: -later.answer], MaskedModel(tiny_model_kv4)
        for _ in range(2):
            logits = greedy.predictions([*context, *own], Life(n))[-1]
            own = [*own, int(logits.argmax())]
        assert model.lost([*own, 0], 3, [])[1].tolist() == [True]
        assert model.lost([*own[:-1], own[-1] ^ 1, 0], 3, [])[1].tolist() == [False]
    finally:
        llm.llm_engine.engine_core.shutdown()

    keys, values, _ = Watched(tiny_model_kv4).of(context)
    x, norms = features(keys)[:, :, : n - recent], values.norm(dim=-1)
    ages = torch.arange(n, recent, -1)[None, None]
    shares = (norms / norms.sum(1, keepdim=True)).log()[..., : n - recent]
    # As inside a context that a request names.
    expected, _ = said(weights, 0, x, ages, 0)
    expected = expected + said_by_network(weights, x, shares)
    assert (by_keys - expected).abs().max() < 1e-2 * expected.std()

    oracle, asked = MaskedModel(tiny_model_kv4), [*context, *later.ids]
    ranked = scores.argsort(-1, descending=True)
    for counts, answer in zip(trials, answers, strict=True):
        kept = [
            [
                [*best[:count].tolist(), *range(n - recent, n)]
                for best, count in zip(rows, mine, strict=True)
            ]
            for rows, mine in zip(ranked, counts, strict=True)
        ]
        lives, rows = (Life(n), Life(n, [Kept(n, n, kept)])), slice(-later.answer - 1, -1)
        full, less = (oracle.predictions(asked, life)[rows].log_softmax(-1) for life in lives)
        assert len(full) == later.answer
        expected = (full.exp() * (full - less)).sum(-1).mean()
        assert answer == pytest.approx(float(expected), rel=1e-3) and answer > 1e-3


def test_a_model_that_answers_nothing_gets_no_profile(tiny_model_kv4, tmp_path, capsys):
    path = tmp_path / "profile.json"
    options = ["--output", str(path), "--samples", "1", "--answers", "1", "--length", "300"]
    assert main([str(tiny_model_kv4), *options, "--dtype", "float32"]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        message.startswith("error: the full cache answers 0 of 24 questions") and "50%" in message
    )
    assert not path.exists()


@pytest.mark.nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_ranks_that_share_a_head_learn_of_all_its_queries(tmp_path):
    model, path = cached_tiny_llama(kv_heads=1), tmp_path / "profile.json"
    options = "--samples 2 --answers 1 --length 500 --dtype float32 -tp 2".split()
    options += ["--prose", str(PROSE), "--least-answered", "0", "--output"]
    words = "vllm_kvevict.calibrate", str(model), *options, str(path)
    done = forked.run(*words, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    profile = read(path)
    found = probe_weights.read(profile.probe, profile.model)
    tokenizer, paragraphs = AutoTokenizer.from_pretrained(model), lessons.prose()
    texts = lessons.lessons(
        tokenizer, paragraphs[: len(paragraphs) * 5 // 6], 2, 500, "learn", varied=True
    )
    watched = Watched(model)
    check_learned(found, texts, lambda ids: Seen(*watched.of(ids)), 8, 32, PROSE)


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [{}, dict(profile="calibrate")], ids=["auto", "calibrate"])
def test_a_first_start_calibrates_and_a_second_one_finds(
    tiny_model_kv4, tmp_path, monkeypatch, asked
):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # A random model loses so much that the budget of "auto" would be the whole cache.
    eviction = dict(policy="auto", budget="25%") | asked
    run_command, times = calibrate._run, []
    # A random model answers nothing.
    lenient = ["--least-answered", "0"]
    monkeypatch.setattr(
        calibrate, "_run", lambda command, limit: run_command([*command, *lenient], limit)
    )
    for _ in range(2):
        with engine(tiny_model_kv4, eviction, max_model_len=2048) as run:
            run.generate([random_prompt(1200, seed=1)], 3)
            assert run.counters.evictions == 1
            found = EvictionConfig.parse(
                run.llm.llm_engine.vllm_config.additional_config["kv_eviction"]
            )
        (file,) = tmp_path.glob("kv_eviction/profiles/*.json")
        assert found.policy == "probe" and found.profile.probe.file == str(file)
        times.append(file.stat().st_mtime_ns)
    assert times[0] == times[1]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--kv-eviction", "streaming-llm"], "a policy whose scores compare across layers"),
        (["--kv-eviction", "snapkv", "--kv-eviction-profile", "auto"], "without --kv-eviction-p"),
        (
            ["--kv-eviction", "snapkv", "--samples", "0"],
            "--samples and --answers must be at least 1",
        ),
        (["--kv-eviction", "snapkv", "-tp", "2"], "are measured on one rank"),
        (["--kv-eviction", "snapkv", "--output", "/no/folder/a.json"], "there is no folder"),
        (["--kv-eviction", "snapkv", "--prompts", "/no/file"], "No such file"),
        (["--least-answered", "50"], "--least-answered must be a number from 0 to 1, not 50.0"),
        (["--seconds", "0"], "--seconds must be a number above 0, not 0.0"),
        (["--prose", "-1"], "--prose must be a number from 0 to 10, not -1.0"),
    ],
)
def test_refusals_are_one_sentence(tiny_model, capsys, flags, says) -> None:
    assert main([str(tiny_model), *flags]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and says in message
