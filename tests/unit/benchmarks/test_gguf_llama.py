"""A GGUF file, written here as llama.cpp does, must give the model that it was written from."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.gguf_llama import convert, name_of

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleave(weight, heads):
    """Rows of each head as llama.cpp orders them: 0, D / 2, 1, D / 2 + 1, ..."""
    size = len(weight) // heads
    order = []
    for head in range(heads):
        for index in range(size // 2):
            order += [head * size + index, head * size + size // 2 + index]
    return weight[order]


def write_gguf(path, model, tokens):
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if name == "lm_head.weight":
            continue
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
        else:
            _, _, layer, *part, _ = name.split(".")
            part = PARTS[".".join(part)]
            if part in ("attn_q", "attn_k"):
                q = part == "attn_q"
                heads = config.num_attention_heads if q else config.num_key_value_heads
                array = interleave(array, heads)
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_same_logits_and_chat(tmp_path):
    torch.manual_seed(0)
    tokens = ["<|endoftext|>", *bytes_to_unicode().values(), "he"]
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, head_dim=8, max_position_embeddings=64,
        rope_theta=7000.0, rms_norm_eps=2**-20, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    # Weights that bfloat16 holds; the rotary frequencies stay in float32, as on loading.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    write_gguf(tmp_path / "model.gguf", model, tokens)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)

    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(len(tokens), (1, 20))
    with torch.inference_mode():
        assert torch.equal(read(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hehe"}], tokenize=False)
    assert chat == "hehe"
    assert tokenizer.tokenize(chat) == ["he", "he"]


def test_refuses_a_tensor_that_a_llama_lacks():
    with pytest.raises(KeyError):
        name_of("blk.0.ffn_gate_inp.weight")
