"""Answers of kvpress's presses, on CPU. Run by the interpreter of .venv-kvpress:

    python -m benchmarks.quality.kvpress_run REQUEST ANSWERS [--part I/N]

REQUEST is the JSON of :class:`benchmarks.quality.kvpress_baseline.Request`, with a ``key`` for each
prompt. To ANSWERS a line is appended for each prompt as soon as it is answered, ``{"key": ...,
"versions": {...}, "answers": [token ids of each cell]}``.
With ``--part`` only every N-th prompt from the I-th on is answered: several processes with one
thread each beat one process with several. The first prompts are answered by kvpress's own context
manager as well: other tokens are an error.
"""

import argparse
import json
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.quality.kvpress_decode import (
    ATTENTION,
    cut,
    decode_kept,
    decode_with_press,
    stop_tokens,
)
from benchmarks.quality.kvpress_kept import Settings, kept_masks, make_press, prefill
from benchmarks.quality.kvpress_kvzip import KVZIP, kvzip_masks


def answer_prompt(model: PreTrainedModel, prompt: dict, settings: Settings) -> list[list[int]]:
    """Tokens of each cell of a prompt; cells that evict at the same point share a batch."""
    ids, cells, max_tokens = prompt["ids"], prompt["cells"], prompt["max_tokens"]
    layers, first = prefill(model, ids)
    answers: dict[int, list[int]] = {}
    for point in sorted({cell["point"] for cell in cells}):
        answers |= _answer_kvzip(model, prompt, point)
        chosen = [i for i, c in enumerate(cells) if c["point"] == point and c["press"] != KVZIP]
        if not chosen:
            continue
        presses = [(cells[index]["press"], cells[index]["keep"]) for index in chosen]
        masks = [kept_masks(layer, point, presses, settings) for layer in layers]
        # At the prompt's end the first token comes from full attention, as in kvpress and vLLM.
        head = [first] if point == len(ids) else []
        if head and first in stop_tokens(model):
            answers |= dict.fromkeys(chosen, head)
            continue
        rows = decode_kept(model, layers, masks, ids[point:] or head, max_tokens - len(head))
        answers |= {index: head + row for index, row in zip(chosen, rows, strict=True)}
    return [answers[index] for index in range(len(cells))]


def _answer_kvzip(model: PreTrainedModel, prompt: dict, point: int) -> dict[int, list[int]]:
    """Tokens of the cells of KVzipPress, by their index. What it keeps has no first token yet."""
    ids, cells = prompt["ids"], prompt["cells"]
    chosen = [i for i, cell in enumerate(cells) if (cell["press"], cell["point"]) == (KVZIP, point)]
    if not chosen:
        return {}
    if point == len(ids):
        raise ValueError("KVzipPress compresses a context that a question follows")
    layers, masks = kvzip_masks(model, ids, point, [cells[i]["keep"] for i in chosen])
    rows = decode_kept(model, layers, masks, ids[point:], prompt["max_tokens"])
    return dict(zip(chosen, rows, strict=True))


def check(model: PreTrainedModel, prompt: dict, settings: Settings, ours: list[list[int]]) -> None:
    """Raise where kvpress's context manager gives other tokens than ``ours``."""
    for cell, answer in zip(prompt["cells"], ours, strict=True):
        if cell["keep"] >= cell["point"] or cell["press"] == KVZIP:
            continue
        press = make_press(cell["press"], cell["point"], cell["keep"], settings)
        theirs = decode_with_press(model, press, prompt["ids"], cell["point"], prompt["max_tokens"])
        if cut(theirs, stop_tokens(model)) != answer:
            raise RuntimeError(f"kvpress answers {theirs}, the shared prefill {answer}: {cell}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("request", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--part", default="0/1")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    request = json.loads(options.request.read_text())
    disable_progress_bar()
    torch.set_num_threads(1)
    settings = Settings(**request["settings"])

    def load(attention: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=getattr(torch, request["dtype"]), attn_implementation=attention
        ).eval()

    model = load(ATTENTION)
    stock = load("sdpa") if request["check"] else model
    versions = {name: metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    with torch.inference_mode(), options.answers.open("a") as file:
        chosen = request["prompts"][part::parts]
        for index, prompt in enumerate(
            tqdm(chosen, desc=f"kvpress {options.part}", unit="sample", position=part)
        ):
            answers = answer_prompt(model, prompt, settings)
            if part + index * parts < request["check"]:
                check(stock, prompt, settings, answers)
            line = {"key": prompt["key"], "versions": versions, "answers": answers}
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
