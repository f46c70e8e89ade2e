"""Answers over vLLM's own 4-bit KV caches, which drop no token.

    python -m benchmarks.quality.vllm_caches --tasks defaults --samples 100 --seed 3000

vLLM's CPU build has no kernel for these caches. Transformers therefore computes the model, and this
module their arithmetic: keys and values are quantised as vLLM 0.32 does when a token enters the
cache, and attention reads what the kernel would read. Samples are those of ``benchmarks.quality``
with the same tasks, length and seed. The question follows the context in a step of its own, as
there if the question is not known.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.provenance import add_model, provenance, sentence
from benchmarks.quality.cell import FULL
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.flips import flips
from benchmarks.quality.intervals import estimate
from benchmarks.quality.journal import Journal
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.measure import render, samples_of, score
from benchmarks.quality.prompt import Prompt
from benchmarks.quality.ruler.tasks import TASKS
from benchmarks.quality.table import paired, percent, row
from benchmarks.smollm2 import real_model

RESULT = Path(__file__).parents[1] / "results" / "vllm_caches.json"
ATTENTION = "kvevict_vllm_cache"
FULL_LAYERS = 2
"""Layers at either end of a model that TurboQuant leaves in 16 bits."""

Quantise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CacheType:
    """A value of ``--kv-cache-dtype``.

    Args:
        keys: Returns keys [..., D] float32 as attention reads them.
        values: The same for values.
        overhead: Bytes per token and KV head in addition to the 4-bit levels of key and value.
        reads_own_step: True if a token's attention in a prefill reads quantised tokens of the same
            step; otherwise it reads these as they were computed.
        full_layers: Layers at either end that are not quantised.

    """

    keys: Quantise
    values: Quantise
    overhead: int
    reads_own_step: bool
    full_layers: int = 0

    def share(self, head_size: int, layers: int) -> float:
        """Memory as a share of a cache in 16 bits."""
        quantised = layers - 2 * self.full_layers
        return 1 - quantised / layers * (1 - (head_size + self.overhead) / (4 * head_size))


@cache
def hadamard(size: int) -> torch.Tensor:
    """[size, size] float32 Sylvester matrix, orthogonal; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def int4_per_token_head(x: torch.Tensor) -> torch.Tensor:
    """[..., D] float32, D a power of two, after ``vllm/v1/attention/ops/int4_per_token_head.py``.

    Rotated; a scale and an integer zero point for each token and head. The zero point takes the low
    bits of the scale.
    """
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    rotated = single_rht(x.contiguous())
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-6)
    zero = _rounded(-low / scale).clamp(0, 15)
    levels = _rounded(rotated / scale + zero).clamp(0, 15)
    stored = ((scale.view(torch.int32) & -16) | zero.to(torch.int32)).view(torch.float32)
    return single_rht((levels - zero) * stored, inverse=True) / x.shape[-1]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest integer, halves away from zero."""
    return x.sign() * (x.abs() + 0.5).floor()


def turboquant_keys(x: torch.Tensor) -> torch.Tensor:
    """[..., D] float32 keys of ``turboquant_4bit_nc``.

    Directions are rotated and take the levels of a normal distribution; what is read has norm 1
    before it is multiplied by the token's norm in 16 bits.
    """
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids

    size = x.shape[-1]
    norm = x.norm(dim=-1, keepdim=True)
    rotated = (x / (norm + 1e-8)) @ hadamard(size)
    levels = get_centroids(size, 4)
    found = levels[torch.bucketize(rotated, (levels[1:] + levels[:-1]) / 2, right=True)]
    found = found / (found.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    return found @ hadamard(size) * norm.half().float()


def turboquant_values(x: torch.Tensor) -> torch.Tensor:
    """[..., D] float32 values of ``turboquant_4bit_nc``: 16 levels from minimum to maximum."""
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-8)
    levels = ((x - low) / scale + 0.5).floor().clamp(0, 15)
    return levels * scale.half().float() + low.half().float()


CACHES = {
    "int4_per_token_head": CacheType(int4_per_token_head, int4_per_token_head, 8, True),
    "turboquant_4bit_nc": CacheType(turboquant_keys, turboquant_values, 6, False, FULL_LAYERS),
}


class Reading:
    """Attention of one request over a cache of some type, called by transformers.

    Args:
        model: Its configuration gives the number of layers.
        cache_type: None for 16 bits.

    """

    def __init__(self, model: PreTrainedModel, cache_type: CacheType | None) -> None:
        layers = model.config.num_hidden_layers
        ends = cache_type.full_layers if cache_type else layers
        self._type = cache_type
        self._layers = range(ends, layers - ends)
        self._read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attention of the tokens of a step.

        Args:
            module: The layer's.
            query: [1, Hq, t, D].
            key: [1, H, T, D] as computed, of which the last t are this step's.
            value: As the keys.
            attention_mask: As transformers made it.
            kwargs: Passed on.

        """
        layer = module.layer_idx
        if self._type is not None and layer in self._layers:
            new, old = query.shape[2], key.shape[2] - query.shape[2]
            own = self._type.keys(key[:, :, old:]), self._type.values(value[:, :, old:])
            before = self._read.get(layer, (key[:, :, :0], value[:, :, :0]))
            # A sliding window keeps the last tokens of what was read before.
            before = tuple(one[:, :, one.shape[2] - old :] for one in before)
            self._read[layer] = tuple(torch.cat(pair, 2) for pair in zip(before, own, strict=True))
            if self._type.reads_own_step or new == 1:
                key, value = self._read[layer]
            else:
                key = torch.cat([before[0], key[:, :, old:]], 2)
                value = torch.cat([before[1], value[:, :, old:]], 2)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


# Models are loaded with this name; each answer registers its own attention.
AttentionInterface.register(ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def answer(
    model: PreTrainedModel, prompt: Prompt, cache_type: CacheType | None, stop: set[int]
) -> list[int]:
    """Greedy tokens: the context in one step, the question in another, then one by one."""
    AttentionInterface.register(ATTENTION, Reading(model, cache_type).attend)
    past = DynamicCache(config=model.config)
    steps: Iterable[tuple[int, ...]] = (prompt.ids[: prompt.context], prompt.ids[prompt.context :])
    for step in steps:
        logits = model(torch.tensor([step]), past_key_values=past, logits_to_keep=1).logits
    found: list[int] = []
    while len(found) < prompt.sample.max_tokens:
        found.append(int(logits[0, -1].argmax()))
        if found[-1] in stop:
            break
        logits = model(torch.tensor([[found[-1]]]), past_key_values=past).logits
    return found


def prompts_of(options: argparse.Namespace, chat: LocalChat) -> list[Prompt]:
    """The samples that ``benchmarks.quality`` makes of the same options."""

    seeds = [options.seed * 1_000_000 + index for index in range(options.samples)]
    return render(chat, samples_of(chat, options.tasks, options.length, seeds), 1)


def markdown(result: dict[str, Any]) -> str:
    """The table of a result: a row for each task and cache."""
    lines = [
        "# Answers over vLLM's own 4-bit caches, simulated",
        "",
        sentence(result, f"{result['options']['samples']} samples a cell, float32"),
        "",
        row("task", "cache", "memory", "right, %", "against the full cache"),
        row("---", "---", "---:", "---:", "---:"),
    ]
    for one in result["cells"]:
        lines.append(
            row(one["task"], one["cache"], f"{100 * one['memory']:.1f}%", one["right"],
                one["flips"])
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def summarise(
    scores: dict[str, dict[str, list[float]]], memory: dict[str, float]
) -> list[dict[str, Any]]:
    """An entry for each task and cache; ``scores`` are by cache and task, the full cache first."""
    return [
        {
            "task": task,
            "cache": name,
            "memory": memory[name],
            "right": percent(estimate(found)),
            "flips": "" if name == FULL else paired(flips(scores[FULL][task], found)),
            **{key: round(value, 5) for key, value in asdict(estimate(found)).items()},
        }
        for task in scores[FULL]
        for name, by_task in scores.items()
        for found in (by_task[task],)
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.vllm_caches")
    add = parser.add_argument
    add("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    add("--tasks", default="defaults", help=f"of {', '.join(TASKS)}; comma-separated")
    add("--caches", default=",".join(CACHES), help=f"of {', '.join(CACHES)}; comma-separated")
    add("--samples", type=int, default=100)
    add("--length", type=int, default=1250, help="tokens of a prompt, about")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--resume", action="store_true", help="keep the answers of an earlier run in --work")
    add("--work", type=Path, default=Path(".cache/quality"), help="folder of raw answers")
    add("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    for name, valid in (("tasks", TASKS), ("caches", CACHES)):
        given = getattr(options, name).split(",")
        if unknown := [one for one in given if one not in valid]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; choose from {', '.join(valid)}")
        setattr(options, name, given)
    return options


def main() -> None:
    options = parse()
    folder = options.model or real_model()
    torch.set_num_threads(options.threads)
    chat = LocalChat(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()
    add_model(folder)
    eos = model.generation_config.eos_token_id
    stop = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    prompts = prompts_of(options, chat)
    caches = {FULL: None} | {name: CACHES[name] for name in options.caches}
    journal = Journal(options.work / "vllm_caches.jsonl", options.resume, Path(folder).name)
    answers: dict[str, list[Completion]] = {name: [] for name in caches}
    with torch.inference_mode(), tqdm(total=len(prompts) * len(caches), unit="answer") as bar:
        for prompt in prompts:
            for name, cache_type in caches.items():
                asked = prompt.ids, prompt.sample.max_tokens, {"cache": name}
                found = journal.find(*asked)
                if found is None:
                    ids = answer(model, prompt, cache_type, stop)
                    found = journal.enter(*asked, Completion(chat.decode(ids), tuple(ids)))
                answers[name].append(found)
                bar.update()
    config = model.config
    memory = {
        name: one.share(config.head_dim, config.num_hidden_layers) if one else 1.0
        for name, one in caches.items()
    }
    scores = {name: score(prompts, found) for name, found in answers.items()}
    result = {
        **provenance(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "cells": summarise(scores, memory),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
