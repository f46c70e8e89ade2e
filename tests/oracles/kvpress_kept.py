"""Which positions kvpress keeps. Run by the interpreter of .venv-kvpress, on CPU in float32.

Reads questions, a JSON list of words a line, and writes a JSON list [layer][KV head] of ascending
positions, the window included, for each: importing kvpress takes longer than all of them.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, DynamicCache

ANSWER = "answer "
"""Before an answer: libraries print, too."""

PRESSES = ["snapkv", "ada-snapkv", "streaming-llm", "tova", "pyramidkv", "observed-attention"]


def make_press(options: argparse.Namespace, ratio: float) -> BasePress:
    if options.press == "streaming-llm":
        return StreamingLLMPress(ratio, n_sink=options.sinks)
    if options.press == "tova":
        return TOVAPress(ratio)
    if options.press == "pyramidkv":
        return PyramidKVPress(ratio, options.window, options.kernel, beta=options.beta)
    if options.press == "observed-attention":
        return ObservedAttentionPress(ratio)
    snapkv = SnapKVPress(ratio, window_size=options.window, kernel_size=options.kernel)
    return AdaKVPress(snapkv, options.floor) if options.press == "ada-snapkv" else snapkv


def record_positions(press: BasePress, kept: dict[int, list[list[int]]]) -> None:
    """Make ``compress`` also prune a copy of the values that holds their positions."""
    compress = press.compress

    def recording(module, hidden_states, keys, values, attentions, kwargs):
        position = torch.arange(keys.shape[2], dtype=values.dtype)[None, None, :, None]
        tagged = position.expand_as(values)
        _, survivors = compress(module, hidden_states, keys, tagged, attentions, kwargs)
        kept[module.layer_idx] = survivors[0, :, :, 0].long().sort(-1).values.tolist()
        return compress(module, hidden_states, keys, values, attentions, kwargs)

    press.compress = recording


def unmasked_positions(module: torch.nn.Module, heads: int, tokens: int) -> list[list[int]]:
    """What AdaKVPress leaves: it masks keys where other presses drop them."""
    keep = torch.ones(heads, tokens, dtype=torch.bool)
    _, masked_heads, masked_positions = module.masked_key_indices
    keep[masked_heads, masked_positions] = False
    return [row.nonzero().flatten().tolist() for row in keep]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, help="JSON list of token ids")
    parser.add_argument("press", choices=PRESSES)
    parser.add_argument("--keep", type=int, required=True, help="per head, window included")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--kernel", type=int, default=5)
    parser.add_argument("--floor", type=float, default=0.2, help="alpha_safeguard")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--beta", type=float, default=20.0, help="of pyramidkv")
    return parser.parse_args(words)


def answer(options: argparse.Namespace) -> list[list[list[int]]]:
    ids = torch.tensor([json.loads(options.tokens.read_text())])
    # Half a token more, because kvpress rounds down what it keeps; of a pyramid's layers it rounds.
    half = 0.5 if options.press != "pyramidkv" else 0.0
    press = make_press(options, 1 - (options.keep + half) / ids.shape[1])
    kept: dict[int, list[list[int]]] = {}
    adaptive = isinstance(press, AdaKVPress)
    attention = "eager" if options.press == "observed-attention" else "sdpa"
    if not adaptive:
        record_positions(press, kept)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=attention
    ).eval()
    with torch.inference_mode(), press(model):
        model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
    if adaptive:
        for layer in model.model.layers:
            heads = model.config.num_key_value_heads
            positions = unmasked_positions(layer.self_attn, heads, ids.shape[1])
            kept[layer.self_attn.layer_idx] = positions
    return [kept[index] for index in sorted(kept)]


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(parsed(json.loads(line)))), flush=True)
