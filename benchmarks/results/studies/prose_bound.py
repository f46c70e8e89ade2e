"""How little prose could lose: survivors chosen by the attention that the continuation will pay.

    PYTHONPATH=. python benchmarks/results/studies/prose_bound.py [texts]

Offline, transformers in float32, masks over the full cache: 1,400 tokens of context, 127 of the
true continuation (`benchmarks.quality.fidelity`'s texts). Every layer keeps the same share, heads
divide it by score; the first 4 and the last 32 tokens stay. Prints the excess of the negative
log-likelihood over the full cache in nats a token, mean and standard error over texts.
"""

import math
import random
import sys

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.quality.ruler.prose import passage
from benchmarks.smollm2 import real_model

CONTEXT, CONTINUATION, LONGEST = 1400, 128, 512
BUDGETS, WINDOWS = (0.125, 0.25), (32, 64, 128, 256, 512)
STATE: dict[str, dict[int, torch.Tensor]] = {}


def attention(module, q, k, v, mask, scaling, **given):
    """Causal attention; ``keep`` [H, N] hides tokens of a layer, ``seen`` takes its weights."""
    layer, queries, tokens, heads = module.layer_idx, q.shape[2], k.shape[2], k.shape[1]
    group, keep = q.shape[1] // heads, STATE.get("keep")
    s = (q.reshape(1, heads, -1, q.shape[-1]) @ k.mT * scaling).view(1, heads, group, queries, -1)
    s[..., tokens - queries :] += torch.full((queries, queries), -math.inf).triu(1)
    if keep is not None:
        hidden = ~keep[layer][None, :, None, None]
        s[..., : hidden.shape[-1]].masked_fill_(hidden, -math.inf)
    p = s.softmax(-1)
    if "seen" in STATE:
        STATE["seen"][layer] = p[0, ..., :CONTEXT].clone()
    out = p.view(1, heads, group * queries, tokens) @ v
    return out.view(1, heads * group, queries, -1).transpose(1, 2), None


def pooled(x: torch.Tensor) -> torch.Tensor:
    return functional.avg_pool1d(x.flatten(0, 1)[:, None], 5, 1, 2)[:, 0].view_as(x)


def scores(window, future, values) -> dict[str, torch.Tensor]:
    """[L, H, N] by name; weights are [L, H, G, queries, N], of the last tokens and what follows."""
    norms = values.norm(dim=-1)
    found = {
        "future attention": future.sum((2, 3)),
        "future attention x value norm": future.sum((2, 3)) * norms,
        "the most recent": (1 / torch.arange(CONTEXT, 0, -1)).expand_as(norms),
    }
    for size in WINDOWS:
        last = window[:, :, :, -size:]
        found[f"window of {size}, mean"] = pooled(last.mean((2, 3))) * norms
        found[f"window of {size}, most"] = pooled(last.amax((2, 3))) * norms
    return found


def loss(model, cache: DynamicCache, ids: list[int], keep: torch.Tensor | None = None) -> float:
    """Nats a token of the continuation, over what is kept of the context; the cache stays."""
    STATE.pop("keep", None)
    if keep is not None:
        STATE["keep"] = dict(enumerate(keep))
    logits = model(torch.tensor([ids[CONTEXT:-1]]), past_key_values=cache).logits[0]
    cache.crop(CONTEXT)
    return functional.cross_entropy(logits, torch.tensor(ids[CONTEXT + 1 :])).item()


@torch.inference_mode()
def main(texts: int) -> None:
    ALL_ATTENTION_FUNCTIONS["study"] = attention
    path = real_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="study"
    ).eval()
    rows: dict[tuple[str, float], list[float]] = {}
    for seed in tqdm(range(texts), unit="text"):
        text = " ".join(passage(random.Random(f"fidelity/{seed}"), 6 * (CONTEXT + CONTINUATION)))
        ids = tokenizer.encode(text, add_special_tokens=False)[: CONTEXT + CONTINUATION]
        cache = DynamicCache()
        STATE.clear()
        model(torch.tensor([ids[: CONTEXT - LONGEST]]), past_key_values=cache)
        STATE["seen"] = {}
        model(torch.tensor([ids[CONTEXT - LONGEST : CONTEXT]]), past_key_values=cache)
        window = torch.stack(list(STATE["seen"].values()))
        full = loss(model, cache, ids)
        future = torch.stack(list(STATE.pop("seen").values()))
        values = torch.stack([layer.values[0] for layer in cache.layers])
        for name, score in scores(window, future, values).items():
            score = score.clone()
            score[..., :4] = score[..., -32:] = math.inf
            for budget in BUDGETS:
                flat = score.flatten(1)
                best = flat.topk(int(budget * flat.shape[1]), -1).indices
                keep = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, best, True)
                excess = loss(model, cache, ids, keep.view_as(score)) - full
                rows.setdefault((name, budget), []).append(excess)
    for (name, budget), excess in rows.items():
        found = torch.tensor(excess)
        print(f"{name}, {budget:.1%}: {found.mean():+.4f} +- {found.std() / texts**0.5:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
