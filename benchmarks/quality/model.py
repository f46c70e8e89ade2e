"""The architecture of the shipped model: a small Llama that vLLM serves as it is."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 4096


def new_model(vocabulary: int, seed: int, head_size: int = 32) -> LlamaForCausalLM:
    """A freshly initialised model: 4 layers, 8 query heads over 4 KV heads.

    Args:
        vocabulary: Tokens of the tokenizer.
        seed: Seed of the weights.
        head_size: 64 makes 3.6 million parameters, 32 makes 2.8 million.

    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_size,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=4,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
