"""select_tokens, compiled: the least kept score of each head, then its columns in order."""

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import exact


def select_tokens(scores: torch.Tensor, pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.select.select_tokens`."""
    kept = pages * block_size
    totals = kept.sum(-1)
    if bool((totals != totals[0]).any()):
        raise ValueError(f"layers keep different numbers of pages: {pages.sum(-1).tolist()}")
    columns = torch.empty(len(scores), int(totals[0]), dtype=torch.int64, device="cpu")
    if not _select(scores.contiguous().numpy(), kept.contiguous().numpy(), columns.numpy()):
        raise ValueError("a head has fewer tokens than its pages hold")
    return columns


@exact
def _select(scores: np.ndarray, kept: np.ndarray, columns: np.ndarray) -> bool:
    """Whether every head has as many tokens as it is to keep."""
    layers, heads, count = scores.shape
    ranked = np.empty(count, np.float32)
    infinity = np.float32(np.inf)
    for layer in range(layers):
        written = 0
        for head in range(heads):
            wanted, real = kept[layer, head], 0
            for i in range(count):
                score = scores[layer, head, i]
                real += score != -infinity
                # NaN ranks first, as in a sort.
                ranked[i] = infinity if np.isnan(score) else score
            if wanted > real:
                return False
            if wanted == 0:
                continue
            least = np.partition(ranked, count - wanted)[count - wanted]
            room = wanted
            for i in range(count):
                room -= ranked[i] > least
            for i in range(count):
                if ranked[i] > least or (ranked[i] == least and room > 0):
                    room -= ranked[i] == least
                    columns[layer, written] = i
                    written += 1
    return True
