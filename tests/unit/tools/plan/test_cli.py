"""The command line of the plan: what it reads, prints and refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.profiles import identity_of, random_profile
from tests.token_formats import BYTES
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.calibrate import FailureFile
from vllm_kvevict.serving.identity import file_name
from vllm_kvevict.serving.profile import cache_folder
from vllm_kvevict.tools.plan.command import main
from vllm_kvevict.tools.plan.options import SizingError, parse
from vllm_kvevict.tools.plan.report import Sizing, as_json, as_text

LOAD = ["--prompt", "2000", "--output", "200", "--block-size", "32", "--dtype", "float32"]
SEQS = ["--max-num-seqs", "64"]
KV = ["--kv-cache-memory-bytes", "8M"]
EVEN = ["--kv-eviction", "ada-defensive"]
"""A policy that needs no profile, so that all layers are one group."""
MLA = dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    max_position_embeddings=4096,
    dtype="float32",
)


def plan(*argv: str) -> Sizing:
    return Sizing.of(*parse(list(argv)))


def test_json_holds_what_the_text_says(model):
    found = plan(model, *LOAD, *KV, "--kv-eviction", "ada-snapkv", "--budget", "256")
    data, text = json.loads(json.dumps(as_json(found))), as_text(found)
    # 2 layers, 1 KV head of 32, keys and values, float32: 8M are 512 blocks of 32 tokens.
    assert data["memory"]["block_bytes"] == 2 * 32 * 2 * 32 * 4
    assert data["memory"]["blocks"] == (8 << 20) // data["memory"]["block_bytes"]
    assert data["eviction"]["policy"] == "ada-snapkv" and data["eviction"]["budget"] == 256
    # Layers, window, query heads, head size, float32.
    assert data["memory"]["eviction_rings"] == data["max_num_seqs"] * 2 * 32 * 2 * 32 * 4
    assert data["with_eviction"]["decode"] < data["without"]["decode"] / 4
    assert data["with_eviction"]["sequences"] > data["without"]["sequences"]
    for part in ("memory", "without", "with_eviction"):
        for value in data[part].values():
            if isinstance(value, int) and not isinstance(value, bool):
                assert str(value) in text, (part, value)


def test_a_format_of_stored_tokens_with_more_tokens_in_a_page(model, monkeypatch):
    """Four tokens in the room of one: 7 blocks of a store are one, and pages have 4x the floats."""
    asked = (*LOAD, *KV, "--kv-eviction", "ada-defensive", "--budget", "256")
    before = as_json(plan(model, *asked))
    monkeypatch.setattr(EvictionConfig, "token_format", BYTES)
    after = as_json(plan(model, *asked))
    assert before["with_eviction"]["evictions"] == after["with_eviction"]["evictions"] > 0
    assert before["with_eviction"]["decode"] - after["with_eviction"]["decode"] == 7 - 1
    for data, page_tokens in ((before, 32), (after, 128)):
        memory = data["memory"]
        # 2 layers, 1 KV head, one float32 a token.
        floats = memory["blocks"] * 2 * page_tokens * 4
        assert memory["eviction_token_stats"] == floats
    assert after["memory"]["block_bytes"] == before["memory"]["block_bytes"]


def test_stock_vllm_has_the_memory_of_evictions_buffers(model):
    """As many blocks as a policy leaves that needs no buffers."""
    load = "--prompt", "1600", "--output", "32", *LOAD[4:]
    device = "--gpu-memory", "64M", "--activations", "0", "--weights", "1M"
    for memory in (KV, device):
        none = as_json(plan(model, *load, *memory, "--kv-eviction", "streaming-llm"))
        some = as_json(plan(model, *load, *memory, "--kv-eviction", "ada-defensive"))
        pools = [data["memory"]["blocks"] for data in (none, some)]
        assert pools[1] < pools[0] == some["memory"]["stock_blocks"]
        assert some["without"] == none["without"]
    some = as_json(plan(model, *load, *KV, "--kv-eviction", "ada-defensive"))
    # Ten requests of 51 blocks, for which the others do not suffice.
    assert some["without"]["decode"] == 51 and some["memory"]["blocks"] - 1 < 510
    assert some["without"]["sequences"] == 10


def eviction_and_notes(*argv: str) -> tuple[dict[str, Any], str]:
    data = as_json(plan(*argv))
    return data["eviction"], "\n".join(data["notes"])


def test_auto_plans_what_the_first_start_makes(model):
    """A server measures a model that has no profile, and serves by the profile."""
    for budget, wanted in (((), "25%"), (("--budget", "256"), 256)):
        for profile in ((), ("--kv-eviction-profile", "calibrate")):
            eviction, notes = eviction_and_notes(model, *LOAD, *KV, *budget, *profile)
            assert (eviction["policy"], eviction["budget"]) == ("probe", wanted)
            assert eviction["profile"]["layers"] == [1.0, 1.0]
            assert "calibrates it at its first start" in notes


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--kv-eviction-profile", "none"], ""),
        (["--load-format", "dummy"], "its weights are random"),
        # Of a stage with one layer no profile helps, so nothing is measured.
        (["--pipeline-parallel-size", "2"], "no profile ships for"),
        (["--skip-tokenizer-init"], "it has no tokenizer"),
    ],
)
def test_auto_plans_what_is_served_without_a_profile(model, flags, reason):
    """The warning is that of the server; without a profile by choice there is none."""
    eviction, notes = eviction_and_notes(model, *LOAD, *KV, *flags)
    assert (eviction["policy"], eviction["budget"]) == ("ada-defensive", "25%")
    assert ("after their context was evicted lose most" in notes) == bool(reason)
    assert reason in notes
    assert f"vllm-kvevict calibrate {model} makes a profile" in notes or not reason


def test_auto_plans_a_profile_that_is_there(model, tmp_path):
    path, _ = random_profile(tmp_path, Path(model))
    eviction, notes = eviction_and_notes(model, *LOAD, *KV, "--kv-eviction-profile", str(path))
    assert eviction["policy"] == "probe" and eviction["profile"]["probe"]["file"] == str(path)
    assert "calibrates it at its first start" not in notes


def test_auto_plans_what_an_earlier_start_has_found(model, monkeypatch, tmp_path):
    """Its failure is remembered, for as long as there is no more time than it had."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    name = f"{file_name(identity_of(Path(model)))}.failed"
    FailureFile(cache_folder() / name).write("it takes 2000 s", seconds=2000.0)
    eviction, notes = eviction_and_notes(model, *LOAD, *KV)
    assert (eviction["policy"], eviction["budget"]) == ("ada-defensive", "25%")
    assert "it takes 2000 s (found at an earlier start" in notes
    longer = "--kv-eviction-calibrate-seconds", "2500"
    eviction, notes = eviction_and_notes(model, *LOAD, *KV, *longer)
    assert eviction["policy"] == "probe" and "calibrates it at its first start" in notes


def test_a_profile_of_a_related_model_is_not_planned_for(model, monkeypatch, tmp_path):
    """The server calibrates, unless it is told to take a profile that it has."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    weights = torch.randn(128, 64)
    file = Path(model, "model.safetensors")
    save_file({"model.embed_tokens.weight": weights}, str(file))
    cache_folder().mkdir(parents=True)
    name = file_name(identity_of(Path(model)))
    path, _ = random_profile(cache_folder(), Path(model), layers=(1.2, 0.8))
    path.rename(cache_folder() / name)
    eviction, notes = eviction_and_notes(model, *LOAD, *KV)
    assert eviction["profile"]["layers"] == [1.2, 0.8] and "calibrates it" not in notes
    save_file({"model.embed_tokens.weight": weights + 0.1 * torch.randn(128, 64)}, str(file))
    eviction, notes = eviction_and_notes(model, *LOAD, *KV)
    assert eviction["profile"]["layers"] == [1.0, 1.0] and "calibrates it" in notes
    eviction, notes = eviction_and_notes(model, *LOAD, *KV, "--kv-eviction-profile", "calibrate")
    assert eviction["profile"]["layers"] == [1.2, 0.8] and "calibrates it" not in notes


def test_what_a_gpu_refuses_is_said_where_a_cpu_plans(model):
    """The plan is made on a laptop, for a server with GPUs."""
    few = [*LOAD, *KV, *EVEN, "--hf-overrides", '{"head_dim": 64}', "--kv-eviction-store-dtype"]
    fp8 = ["--kv-cache-dtype", "fp8"]
    eviction, notes = eviction_and_notes(model, *few, "int4", *fp8)
    assert eviction["store_dtype"] == "int4_fp8"
    assert "this is a plan for CPUs. On GPUs KV eviction does not support" in notes
    assert "with an FP8 cache on GPUs, because" in notes
    for served in ([*few, "int4"], [*few, "auto", *fp8]):
        assert "a plan for CPUs" not in eviction_and_notes(model, *served)[1]


def test_nothing_is_measured(model, monkeypatch):
    from vllm_kvevict.serving import calibrate

    def run(*_: Any) -> None:
        raise AssertionError("calibrate was started")

    monkeypatch.setattr(calibrate, "_run", run)
    weights = Path(model, "model.safetensors")
    save_file({"lm_head.weight": torch.zeros(128, 64)}, str(weights))
    assert plan(model, *LOAD, *KV).config.policy == "probe"
    # A server with the same flags would start it.
    with pytest.raises(AssertionError, match="calibrate was started"):
        serve(model)


def serve(model: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    additional = {"kv_eviction": {"policy": "auto"}}
    EngineArgs(
        model=model, additional_config=additional, kv_cache_memory_bytes=8 << 20, block_size=32
    ).create_engine_config()


def test_a_context_that_all_requests_share(model):
    found = plan(model, *LOAD, *KV, *EVEN, "--budget", "256", "--context", "1900")
    data, text = as_json(found), as_text(found)
    assert found.shared == data["shared_blocks"] == 7 + 1
    assert data["sharing"]["sequences"] > data["with_eviction"]["sequences"]
    assert "one context of 1900 of these tokens" in text
    for name in ("decode", "sequences", "mean_sequences"):
        assert f" {data['sharing'][name]}\n" in text + "\n"


def test_under_pressure_it_says_how_many_keep_everything(model):
    usual = plan(model, *LOAD, *KV, "--budget", "256")
    pressure = plan(model, *LOAD, *KV, "--budget", "256", "--kv-eviction-when", "pressure")
    more = set(as_text(pressure).splitlines()) - set(as_text(usual).splitlines())
    (line,) = more
    assert f"up to {usual.mean_sequences(usual.without)} such requests" in line


def test_a_file_a_folder_and_a_renamed_file(model, tmp_path):
    renamed = tmp_path / "mine.json"
    shutil.copy(f"{model}/config.json", renamed)
    plans = [
        as_json(plan(m, *LOAD, *KV, *EVEN)) for m in (model, f"{model}/config.json", str(renamed))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_a_device_is_shared_out(model):
    """KV cache, weights, activations and eviction's buffers make up the device's usable share."""
    device = ["--gpu-memory", "1G", "--gpu-memory-utilization", "0.5", "--activations", "64M"]
    memory = as_json(plan(model, *LOAD, *device))["memory"]
    # Embedding and head, 2 layers of q, k, v, o (k, v one head of 32) and a three-part MLP; norms.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 64 + 2 * 64
    assert memory["weights"] == 4 * (2 * 128 * 64 + 2 * layer + 64)
    assert memory["activations"] == 64 << 20
    used = sum(memory[n] for n in ("weights", "activations", "eviction_rings", "kv_cache"))
    used += memory["eviction_token_stats"]
    assert 0 <= (1 << 29) - used < memory["block_bytes"]


def test_ranks_share_heads_layers_and_weights(model):
    device = [*SEQS, *EVEN, "--gpu-memory", "1G", "--activations", "64M"]
    one = as_json(plan(model, *LOAD, *device))["memory"]
    tensor = as_json(plan(model, *LOAD, *device, "--tensor-parallel-size", "2"))["memory"]
    assert tensor["weights"] * 2 == one["weights"]
    assert tensor["eviction_rings"] * 2 == one["eviction_rings"]
    assert tensor["block_bytes"] == one["block_bytes"], "one KV head cannot be split"
    stages = as_json(plan(model, *LOAD, *device, "--pipeline-parallel-size", "2"))["memory"]
    assert stages["block_bytes"] * 2 == one["block_bytes"]


def test_stages_have_layers_of_every_group(model, tmp_path):
    config = json.loads(Path(model, "config.json").read_text()) | {"num_hidden_layers": 4}
    (path := tmp_path / "config.json").write_text(json.dumps(config))
    stages = "--pipeline-parallel-size", "2"
    alike, groups = (
        as_json(plan(str(path), *LOAD, *KV, *stages, "--kv-eviction", policy))["memory"]
        for policy in ("snapkv", "pyramidkv")
    )
    # Of the two layers of a stage each is of another group, which a block is for.
    assert groups["block_bytes"] * 2 == alike["block_bytes"]
    assert groups["blocks"] == 2 * alike["blocks"]


def test_weights_of_a_checkpoint_are_its_files(model, tmp_path):
    save_file({"a": torch.zeros(1000)}, f"{model}/model.safetensors")
    memory = as_json(plan(model, *LOAD, "--gpu-memory", "1G"))["memory"]
    assert 4000 <= memory["weights"] < 4200
    assert memory["weights_from"] == "the checkpoint's files"
    # One file of two is here.
    index = {"metadata": {"total_size": 8000}, "weight_map": {"a": "1", "b": "2"}}
    Path(model, "model.safetensors.index.json").write_text(json.dumps(index))
    memory = as_json(plan(model, *LOAD, "--gpu-memory", "1G"))["memory"]
    assert memory["weights"] == 8000 and memory["weights_from"] == "the checkpoint's index"


@pytest.mark.parametrize(
    "argv, says",
    [
        ([*LOAD], "give one of --gpu-memory"),
        ([*LOAD, *KV, "--gpu-memory", "1G"], "give one of --gpu-memory"),
        (["--prompt", "0", *KV], "--prompt: must be at least 1, not 0"),
        (["--prompt", "9", "--output", "0", *KV], "--output: must be at least 1, not 0"),
        (["--prompt", "4000", "--output", "200", *KV], "longest sequence of 4096 tokens"),
        ([*LOAD, *KV, "--budget", "none"], "--kv-eviction-budget: give tokens"),
        ([*LOAD, *KV, "--kv-eviction", "best"], "unknown policy 'best'; choose from"),
        ([*LOAD, *KV, "--kv-eviction", "none"], "eviction is off"),
        ([*LOAD, *KV, "--context", "2000"], "--context: must be at least 1 and less than --prompt"),
        ([*LOAD, *KV, "--context", "9", "--kv-eviction", "nacl"], "nacl .* shares no stores"),
        ([*LOAD, "--kv-cache-memory-bytes", "64K"], "estimated maximum model length"),
        ([*LOAD, "--gpu-memory", "1M"], "leave no room for a KV cache"),
        ([*LOAD, *KV, "--kv-cache-dtype", "fp8_e5m2"], "does not support this type of KV cache"),
    ],
)
def test_refusals(model, argv, says):
    with pytest.raises(SizingError, match=says):
        plan(model, *argv)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--prompt", "0"], "--prompt: must be at least 1, not 0"),
        (["--prompt", "many"], "--prompt: must be a whole number of tokens, not 'many'"),
        (["--prompt=9", "--output=0"], "--output: must be at least 1, not 0"),
        (["--prompt", "16000", "--output", "500"], "longest sequence of 4096 tokens"),
        (["--prompt", "20", "--context", "20"], "--context: must be at least 1 and less than"),
        (["--output", "20"], "give --prompt"),
    ],
)
def test_a_wrong_load_is_told_without_vllm(model, argv, says):
    """Importing it takes 20 seconds."""
    script = f"""
import sys
from vllm_kvevict.tools.plan.command import main
code = main({[model, *argv, *KV]!r})
assert "vllm" not in sys.modules and "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and says in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.slow
def test_the_first_line_is_the_plans(model):
    """vLLM's was about Triton and a backend for CPUs, whatever the level of its log."""
    argv = [model, *LOAD, *KV, *EVEN]
    command = [sys.executable, "-m", "vllm_kvevict.tools.plan", *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Triton" not in done.stderr + done.stdout


def test_sparse_mla_is_refused(model):
    from pathlib import Path

    sparse = MLA | dict(index_topk=32)
    (Path(model) / "config.json").write_text(json.dumps(sparse))
    with pytest.raises(SizingError, match="does not support sparse MLA models"):
        plan(model, *LOAD, *KV)


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(layer_types=["full_attention", "ring_attention"]), "of the kind 'ring_attention'"),
        (dict(block_configs=[{}]), "layers of this model differ"),
    ],
)
def test_layers_it_does_not_know(model, settings, says):
    from vllm_kvevict.tools.plan.model import rank_specs

    _, vllm_config, config = parse([model, *LOAD, *KV])
    for name, value in settings.items():
        setattr(vllm_config.model_config.hf_text_config, name, value)
    with pytest.raises(SizingError, match=says):
        rank_specs(vllm_config, config)


@pytest.mark.parametrize(
    "given, says",
    [
        ("/no/such/folder", "there is no config.json or model folder /no/such/folder"),
        ("nobody/no-such-model", "nobody/no-such-model was not found"),
        ("EMPTY", "has no config.json"),
    ],
)
def test_an_unknown_model(given, says, tmp_path, capsys):
    given = str(tmp_path) if given == "EMPTY" else given
    assert main([given, *LOAD, *KV]) == 1
    *before, error = capsys.readouterr().err.splitlines()
    assert says in error and error.startswith("error: ")
    # What is about to be downloaded is said first.
    assert [line.startswith("reading ") for line in before] == [True] * given.startswith("nobody")
