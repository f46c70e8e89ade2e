"""The model that is served: Llama-3.1-8B's shapes, no weights, a tokenizer made on the spot."""

import json
from pathlib import Path
from typing import Any

from benchmarks.simulate.model import MODELS
from vllm_kvevict.config.memory_budget import RING_BYTES

# The tokenizer's words are numbers from 0 on.
LLAMA_8B = MODELS["llama-3.1-8b"] | dict(bos_token_id=0, eos_token_id=1)
TINY = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=4096,
)  # fmt: skip
ITEMSIZE = 2


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """A configuration, and a tokenizer in which every id is a word of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return folder


def token_bytes(config: dict[str, Any]) -> int:
    """Bytes of keys and values of one token."""
    heads = config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * heads * 2 * ITEMSIZE


def ring_bytes(config: dict[str, Any], sequences: int, window: int) -> int:
    """Bytes of the observation rings of so many sequences, which stock vLLM has not."""
    heads = config["num_attention_heads"] * config["head_dim"]
    slot = config["num_hidden_layers"] * window * heads * ITEMSIZE
    return slot * min(sequences, max(1, RING_BYTES // slot))
