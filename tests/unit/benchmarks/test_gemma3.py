"""Tensors of Gemma 3 that are written as llama.cpp writes them must load into the model."""

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.gemma3 import TENSORS, parameters

CONFIG = Gemma3TextConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)


def write_gguf(path, model):
    """Write the weights as llama.cpp does: those of RMSNorm plus one."""
    writer = gguf.GGUFWriter(path, "gemma3")
    by_parameter = {ours: theirs for theirs, ours in TENSORS.items()}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = name.removesuffix(".weight").split(".")
        block = ""
        if parts[1] == "layers":
            block, parts = f"blk.{parts[2]}.", parts[3:]
        tensor = by_parameter[".".join(parts)]
        more = 1 if "norm" in tensor else 0
        writer.add_tensor(f"{block}{tensor}.weight", (value.float() + more).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_logits_equal_those_of_the_model_that_was_written(tmp_path):
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(CONFIG).eval()
    for name, value in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(value, std=0.5)
        value.data = value.bfloat16().float()
    write_gguf(tmp_path / "tiny.gguf", model)
    read = Gemma3ForCausalLM(CONFIG).eval()
    weights = {name: value.float() for name, value in parameters(tmp_path / "tiny.gguf").items()}
    missing = read.load_state_dict(weights, strict=False).missing_keys
    read.tie_weights()
    assert missing == ["lm_head.weight"]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
