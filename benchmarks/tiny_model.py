"""Small random-weight models, made on the spot and cached: nothing is downloaded."""

import hashlib
import inspect
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[1] / ".cache" / "models"

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def random_prompt(n: int, seed: int, vocab: int = 1024) -> list[int]:
    """``n`` ordinary token ids (no special ones), the same for the same seed."""
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(len(SPECIAL_TOKENS), vocab) for _ in range(n)]


def random_text(words: int, seed: int) -> str:
    """Pseudo-words of one to three syllables in short sentences."""
    rng = random.Random(f"text {seed}")
    syllables = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")]
    vocabulary = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(1500)]
    out = [rng.choice(vocabulary) + rng.choice(["", "", "", "", ",", "."]) for _ in range(words)]
    return " ".join(out)


def tiny_llama(
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 1024,
    max_len: int = 4096,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a random-weight Llama checkpoint with a tokenizer and a chat template.

    The weights are large enough that attention is far from uniform and that greedy decoding
    depends on the whole context; the KV heads of a layer differ in sharpness, so adaptive
    budgets come out uneven.

    Args:
        path: Folder to create.
        layers: Decoder layers.
        hidden: Width of the residual stream; the MLP is twice as wide.
        heads: Query heads.
        kv_heads: KV heads, a divisor of ``heads``.
        head_dim: Size of a head.
        vocab: Vocabulary size, special tokens included.
        max_len: Longest context (``max_position_embeddings``).
        dtype: torch dtype name of the saved weights.
        seed: Seed of the weights.

    Returns:
        ``path``.

    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(vocab, max_len)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        _spread_weights(model)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def cached_tiny_llama(**parameters: Any) -> Path:
    """The checkpoint of :func:`tiny_llama` for these parameters, made on first use.

    Safe with several processes: each writes a folder of its own and the first rename wins.
    """
    key = json.dumps(parameters, sort_keys=True) + inspect.getsource(sys.modules[__name__])
    path = CACHE / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not path.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=CACHE))
        try:
            tiny_llama(draft, **parameters)
            draft.chmod(0o755)
            os.rename(draft, path)
        except OSError:
            if not path.is_dir():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return path


def _tokenizer(vocab: int, max_len: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((random_text(1000, seed) for seed in range(20)), trainer)
    assert bpe.get_vocab_size() == vocab, "every id the model can emit must have a token"
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=max_len,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _spread_weights(model: Any) -> None:
    """Draw the weights so that attention logits have a standard deviation of 1 to 3.

    Sharper attention amplifies rounding until float32 kernels disagree on tokens; flatter
    attention makes greedy decoding repeat itself and ignore what is evicted.
    """
    import torch

    config = model.config
    narrow = config.hidden_size**-0.5
    with torch.no_grad():
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        torch.nn.init.normal_(model.lm_head.weight, std=2 * narrow)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            sharpness = torch.linspace(0.5, 1.5, config.num_key_value_heads)
            sharpness = sharpness[torch.randperm(config.num_key_value_heads)]
            torch.nn.init.normal_(attention.q_proj.weight, std=1.4 * narrow)
            torch.nn.init.normal_(attention.k_proj.weight, std=1.4 * narrow)
            attention.k_proj.weight *= sharpness.repeat_interleave(config.head_dim)[:, None]
            torch.nn.init.normal_(attention.v_proj.weight, std=1.5 * narrow)
            torch.nn.init.normal_(attention.o_proj.weight, std=1.5 * narrow)
            for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
                torch.nn.init.normal_(linear.weight, std=narrow)
