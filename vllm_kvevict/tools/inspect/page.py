"""The page: the prompt's own text, each token shaded by how many KV heads hold it."""

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from vllm_kvevict.tools.inspect.view import View

PENDING = 8
"""Tokens that may hold one character together; byte tokens hold a quarter."""


def as_html(views: Sequence[View]) -> str:
    """One page that needs no network; ``views`` are runs of one prompt, policy by policy."""
    template = (files("vllm_kvevict.tools.inspect") / "page.html").read_text(encoding="utf-8")
    # ASCII without "<": nothing in it can end the element that holds it.
    data = json.dumps(page_data(views)).replace("<", "\\u003c")
    return template.replace("__DATA__", data)


def page_data(views: Sequence[View]) -> dict[str, Any]:
    """Return the data of the page: the prompt once, and the answer and counts of every run."""
    first = views[0]
    prompt, layers = first.run.prompt, first.snapshot.layers
    return {
        "model": first.options.model.rstrip("/").rpartition("/")[2],
        "file": first.options.prompt_file.name,
        "tokens": token_texts(first.run.tokenizer, prompt.ids),
        "layers": [layer.index for layer in layers],
        "heads": [len(layer.heads) for layer in layers],
        "find": [[one.text, one.start, one.stop] for one in first.sightings],
        "runs": [
            {
                "policy": view.run.config.policy,
                "budget": str(view.run.config.budget),
                "tokens": view.run.budget,
                "state": f"Blocks of {view.run.block_size}: {view.snapshot.blocks_before} before, "
                f"{view.snapshot.blocks_after} after. Shown {view.moment}.",
                "answer": view.run.answer,
                "counts": base64.b64encode(held_counts(view).tobytes()).decode(),
            }
            for view in views
        ],
    }


def held_counts(view: View) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """[L, N] KV heads (at most 255) of a layer that hold each of the prompt's N tokens.

    Tokens that were computed after the snapshot are in every head.
    """
    length = max(len(view.run.prompt.ids), view.snapshot.num_tokens)
    masks = [layer.mask(length).sum(0) for layer in view.snapshot.layers]
    return np.stack(masks)[:, : len(view.run.prompt.ids)].astype(np.uint8)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the decoded prompt.

    Of tokens that hold one character together the last has its text, the others have none.
    """
    texts, before, start = [], 0, 0
    for stop in range(1, len(ids) + 1):
        # Some tokenizers drop a space at the start: decode with the tokens before it.
        known = tokenizer.decode(ids[before:start])
        text = tokenizer.decode(ids[before:stop])
        whole = not text.endswith("\ufffd") or stop - start >= PENDING or stop == len(ids)
        texts.append(text[len(known) :] if whole else "")
        if whole:
            before, start = start, stop
    return texts
