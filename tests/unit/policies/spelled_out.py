"""Evictions to try policies on, and attention spelled out in Python floats."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import Candidates, Scorer


@dataclass
class Case:
    """One layer's candidates and how much every head keeps of them."""

    candidates: Candidates
    block_size: int
    store_blocks: int

    @property
    def keep(self) -> int:
        return self.store_blocks * self.block_size

    def columns(self, head: int) -> list[int]:
        """Evictable columns of a head, without its padding."""
        end = self.candidates.num_candidates
        return [c for c in range(end) if self.candidates.valid[head, c]]

    def kept(self, scorer: Scorer) -> list[list[int]]:
        """Columns that each head keeps by our scores."""
        scores = scorer.scores(self.candidates)
        assert scores.dtype == torch.float32
        assert scores.shape == (self.candidates.num_heads, self.candidates.num_candidates)
        assert torch.equal(
            scores == -math.inf, ~self.candidates.valid[:, : self.candidates.num_candidates]
        )
        pages = torch.full((1, self.candidates.num_heads), self.store_blocks)
        columns = select_tokens(scores[None], pages, self.block_size)[0]
        return [head.tolist() for head in columns.split(self.keep)]


def attention(candidates: Candidates, head: int) -> list[list[dict[int, float]]]:
    """[G][w] weight that each query gives each column it sees."""
    keys = candidates.keys[head].double().tolist()
    valid = candidates.valid[head].tolist()
    last = len(valid) - candidates.window
    rows = []
    for query_head in candidates.queries[head].double().tolist():
        rows.append([])
        for i, query in enumerate(query_head):
            weights = {}
            for column in range(last + i + 1):
                if valid[column]:
                    logit = candidates.scale * math.fsum(
                        a * b for a, b in zip(query, keys[column], strict=True)
                    )
                    if candidates.softcap:
                        logit = candidates.softcap * math.tanh(logit / candidates.softcap)
                    weights[column] = math.exp(logit)
            whole = math.fsum(weights.values())
            rows[-1].append({column: weight / whole for column, weight in weights.items()})
    return rows


@st.composite
def cases(draw, ragged: bool = True):
    """A first eviction, or a later one: heads with fewer pages are padded at the left, and what
    lies in the padding is not a number."""
    heads, group, window = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    block_size, pages, size = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
    )
    rest = draw(st.integers(0, block_size - 1))
    columns = pages * block_size + rest + window
    padded = st.lists(st.integers(0, pages - 1), min_size=heads, max_size=heads)
    padding = draw(padded) if ragged else [0] * heads
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    valid = torch.arange(columns) >= block_size * torch.tensor(padding)[:, None]
    keys = 3 * torch.randn(heads, columns, size, generator=generator)
    store = draw(st.integers(1, pages - max(padding)))
    candidates = Candidates(
        keys=keys.masked_fill(~valid[..., None], draw(st.sampled_from([math.nan, math.inf, 9.0]))),
        valid=valid,
        queries=torch.randn(heads, group, window, size, generator=generator),
        window=window,
        num_candidates=pages * block_size,
        scale=size**-0.5,
        softcap=draw(st.sampled_from([0.0, 5.0])),
        keep=store * block_size,
        value_shares=torch.rand(heads, columns, generator=generator).masked_fill(~valid, math.nan),
        seed=(draw(st.integers(-(2**63), 2**63 - 1)), columns),
    )
    return Case(candidates, block_size, store)
