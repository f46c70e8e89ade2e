"""How a layer's heads differ, and what sharing budget between them changes, page size by page size.

    .venv-kvpress/bin/python -m benchmarks.quality.heads

On the CPU with transformers, without a server: the reference operations choose, masks evict. All
rows of a budget keep the same total and the same window; only who gets the pages differs. Run by
the interpreter of .venv-kvpress, whose transformers decodes many masks as one batch.
"""

import argparse
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.logging import disable_progress_bar

from benchmarks.quality.head_split import SPLITS, UNIT, found, keep_mask, spread
from benchmarks.quality.heads_report import write_report
from benchmarks.quality.kvpress_decode import ATTENTION, decode_kept
from benchmarks.quality.kvpress_kept import LayerPrefill, prefill
from benchmarks.quality.prompt import SCENARIOS, Prompt, make_prompt
from benchmarks.quality.tasks import TASKS, make
from vllm_kvevict.ops.reference.score import pool, window_attention
from vllm_kvevict.policies.base import Candidates

SHIPPED = Path(__file__).parent / "model"


def queries(layer: LayerPrefill, point: int, window: int) -> torch.Tensor:
    """[H, G, w, D]: rotated queries of the last w of the first ``point`` tokens."""
    hidden = layer.hidden[:, point - window : point]
    heads = layer.module.q_proj(hidden).unflatten(-1, (-1, layer.keys.shape[-1])).transpose(1, 2)
    cos, sin = (part[:, point - window : point] for part in layer.rotary)
    rotated, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    return rotated[0].unflatten(0, (layer.keys.shape[1], -1))


def attention_of(layer: LayerPrefill, point: int, window: int, candidates: int) -> torch.Tensor:
    """[H, candidates]: mean attention of the window on each token, before pooling."""
    keys = layer.keys[0, :, :point].float()
    return window_attention(
        Candidates(
            keys=keys,
            valid=torch.ones(keys.shape[:2], dtype=torch.bool),
            queries=queries(layer, point, window).float(),
            window=window,
            num_candidates=candidates,
            scale=layer.module.scaling,
        )
    )[:, :candidates]


def measure(model: PreTrainedModel, tokenizer, prompt: Prompt, options: argparse.Namespace) -> dict:
    """Scores of every (scenario, budget, split) on one prompt, and what explains them."""
    layers, first = prefill(model, list(prompt.ids))
    result: dict = {"task": prompt.sample.task, "cells": {}, "spread": {}}
    text = prompt.sample.answers[0]
    needle = found(
        prompt.ids[: prompt.context], tokenizer(text, add_special_tokens=False).input_ids
    )
    for scenario in SCENARIOS:
        point = prompt.point(scenario)
        columns = (point - options.window) // UNIT * UNIT
        attention = torch.stack(
            [attention_of(layer, point, options.window, columns) for layer in layers]
        )
        valid = torch.ones_like(attention[0], dtype=torch.bool)
        scores = torch.stack([pool(one, valid, 7, "max") for one in attention])
        result["spread"][scenario] = spread(attention)
        names, masks = [], []
        for budget in options.budgets:
            units = max(1, (point * budget // 100 - options.window) // UNIT)
            if units * UNIT >= columns:
                continue
            for split in SPLITS:
                names.append(f"{scenario}/{budget}/{split}")
                masks.append(keep_mask(scores, split, units, point))
        head = [first] if point == len(prompt.ids) else []
        by_layer = list(torch.stack(masks).unbind(1))
        answers = decode_kept(
            model, layers, by_layer, list(prompt.ids[point:]) or head,
            options.max_tokens - len(head),
        )  # fmt: skip
        for name, mask, answer in zip(names, masks, answers, strict=True):
            kept = mask[:, :, :columns]
            share = (attention * kept).sum((1, 2)) / attention.sum((1, 2))
            cell = {
                "score": prompt.sample.score(tokenizer.decode(head + answer)),
                "attention": share.mean().item(),
                "moved": ((kept.sum(-1) / kept.sum((1, 2))[:, None] * kept.shape[1] - 1).abs() / 2)
                .mean()
                .item(),
            }
            if needle is not None:
                cell["needle"] = mask[:, :, needle].all(-1).float().mean(-1).tolist()
            result["cells"][name] = cell
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--samples", type=int, default=100, help="samples of each task")
    parser.add_argument("--words", type=int, default=900, help="words of context")
    parser.add_argument("--budgets", default="10,20,40", help="percent, comma-separated")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/heads.json"))
    options = parser.parse_args()
    options.budgets = [int(budget) for budget in options.budgets.split(",")]
    torch.set_num_threads(1)
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()

    def tokenize(messages: list[dict[str, str]]) -> list[int]:
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(chat, add_special_tokens=False).input_ids

    samples = [
        make(task, options.words, seed)
        for task in options.tasks.split(",")
        for seed in range(options.samples)
    ]
    results = defaultdict(list)
    with torch.inference_mode():
        for sample in tqdm(samples, unit="sample"):
            prompt = make_prompt(sample, tokenize)
            results[sample.task].append(measure(model, tokenizer, prompt, options))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    write_report(options.output, results, settings, [asdict(split) for split in SPLITS])


if __name__ == "__main__":
    main()
