"""The token oracle of fitted values: ridge regression over transformers' queries, keys and values.

It shares no code with the package: least squares of each head by itself, in float64.
"""

from typing import Any

import torch

ROWS = 16
RIDGE = 0.01


class FittedValues:
    """Attention of one pass over a prompt, with the values that every eviction left."""

    def __init__(self, life: Any) -> None:
        self._evictions = life.evictions
        self._queries: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, weights: torch.Tensor, parts: tuple[torch.Tensor, ...], scaling: float
    ) -> torch.Tensor:
        """[1, heads, q, D] outputs of rows of weights, the queries [1, heads, q, D], and keys
        and values of all tokens [1, KV heads, n, D]."""
        query, key, value = parts
        group = query.shape[1] // key.shape[1]
        if layer not in self._queries:
            self._queries[layer] = query[0]
            return weights @ value.repeat_interleave(group, dim=1)
        queries = torch.cat([self._queries[layer], query[0]], dim=1)
        n, row = key.shape[2], key.shape[2] - query.shape[2]
        start, held, found = row, value[0].double(), []
        seen = torch.ones(held.shape[:2], dtype=torch.bool)

        def rows(end: int) -> torch.Tensor:
            values = held.to(value.dtype).repeat_interleave(group, dim=0)
            return weights[0, :, row - start : end - start] @ values

        for eviction in self._evictions:
            heads = eviction.positions[layer]
            if heads is None or eviction.n > n:
                continue
            found.append(rows(eviction.n))
            row, before, seen = eviction.n, seen, torch.zeros_like(seen)
            seen[:, eviction.tail_start :] = True
            held = held.clone()
            for head, positions in enumerate(heads):
                seen[head, positions] = True
                if eviction.fitted:
                    asked = queries[head * group : (head + 1) * group, row - ROWS : row]
                    mine = asked.double() * scaling, key[0, head, :row].double()
                    sets = before[head, :row], seen[head, :row]
                    held[head, positions] += _shift(*mine, held[head, :row], *sets, positions)
        found.append(rows(n))
        return torch.cat(found, dim=1)[None]


def _shift(queries, keys, values, before, after, positions) -> torch.Tensor:
    """[K, D] what least squares add to the values at ``positions``."""
    n = len(keys)
    own = torch.arange(n - ROWS, n).repeat(len(queries))[:, None]
    logits = (queries.flatten(0, 1) @ keys.T).masked_fill(torch.arange(n) > own, float("-inf"))
    full, few = (logits.masked_fill(~seen, float("-inf")).softmax(-1) for seen in (before, after))
    lost = (full - few) @ values
    ridge = RIDGE**0.5 * torch.eye(len(positions), dtype=lost.dtype)
    # "gelsd" knows no full rank: rows of attention weights may be alike.
    system = torch.cat([few[:, positions], ridge])
    aim = torch.cat([lost, torch.zeros(len(positions), lost.shape[1], dtype=lost.dtype)])
    return torch.linalg.lstsq(system, aim, driver="gelsd").solution
