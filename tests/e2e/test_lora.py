"""LoRA under eviction: an adapter's tokens equal the oracle's on the merged weights."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.drafters import medusa
from tests.e2e.speculation_script import ITS_OWN, SPECULATIVE, Drafter
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.versions import MEDUSA

RANK, ALPHA = 8, 16
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def adapter_and_merged(tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    """A random adapter for the tiny model, and the model with the adapter merged into it."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    adapter, merged = tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("merged")
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        for name in MODULES:
            weight = layer.get_submodule(name).weight
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.05
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.05
            prefix = f"base_model.model.model.layers.{index}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = up
            weight.data += ALPHA / RANK * up @ down
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, bias="none",
        target_modules=sorted({name.split(".")[1] for name in MODULES}),
    )  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)
    return adapter, merged


PROMPTS = [random_prompt(n, seed=400) for n in (400, 400, 250, 250)]
# vLLM's CPU kernel takes "no adapter" (-1) for the last slot: leave that one empty.
SERVED = dict(enable_lora=True, max_loras=2, max_lora_rank=RANK, max_num_seqs=8)


def assert_exact(run, adapter: Path, oracles: list[MaskedModel]) -> list[list[int]]:
    """With the adapter and without it in one batch; ``oracles`` are of the two."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    run.recorder.lives.clear()
    outputs = run.llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        lora_request=[LoRARequest("mine", 1, str(adapter)), None] * 2,
        use_tqdm=False,
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens[0] != tokens[1] and tokens[2] != tokens[3]
    for oracle, prompt, output, lives in zip(
        oracles * 2, PROMPTS, tokens, run.lives(), strict=True
    ):
        assert len(lives[-1].evictions) >= 3
        assert check_tokens(oracle, prompt, output, lives) == (100, 100)
    return tokens


def test_lora(tiny_model, adapter_and_merged):
    """Twice, prefix caching on."""
    adapter, merged = adapter_and_merged
    oracles = [MaskedModel(merged), MaskedModel(tiny_model)]
    settings = dict(policy="ada-snapkv", budget=96, interval=32)
    with engine(tiny_model, settings, enable_prefix_caching=True, **SERVED) as run:
        free = run.free_blocks()
        for _ in range(2):
            assert_exact(run, adapter, oracles)
        assert run.counters.prefix_hits_capped > 0
        assert run.free_blocks() == free


@MEDUSA
@pytest.mark.nightly
def test_beside_drafts(tiny_model, adapter_and_merged, tmp_path):
    """Drafts are the proposer's, then the answers, of which every fourth token is wrong."""
    adapter, merged = adapter_and_merged
    oracles = [MaskedModel(merged), MaskedModel(tiny_model)]
    settings = dict(policy="ada-snapkv", budget=96, interval=32)
    speculative = SPECULATIVE["medusa"] | dict(method="medusa")
    speculative["model"] = str(medusa(tmp_path / "medusa", tiny_model))
    options = dict(enable_prefix_caching=True, max_num_batched_tokens=96, **SERVED)
    with engine(tiny_model, settings, speculative_config=speculative, **options) as run:
        drafter, free = Drafter(run, PROMPTS), run.free_blocks()
        drafter.phase = ITS_OWN
        drafter.answers = assert_exact(run, adapter, oracles)
        for drafter.phase in range(2):
            assert assert_exact(run, adapter, oracles) == drafter.answers
        assert drafter.accepted > 100 and drafter.drafted > drafter.accepted
        assert run.free_blocks() == free
