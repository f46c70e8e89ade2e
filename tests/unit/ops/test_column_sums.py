"""Column sums of attention against a full softmax matrix in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.column_sums import column_sums


def spelled_out(queries, keys, lengths, scale, softcap, sinks=None):
    """[B, N] float64: one softmax row at a time."""
    batch, group, count, _ = queries.shape
    sums = torch.zeros(batch, keys.shape[1], dtype=torch.float64)
    for b in range(batch):
        for g in range(group):
            for i in range(count):
                seen = int(lengths[b]) - count + i + 1
                logits = scale * (keys[b, :seen].double() @ queries[b, g, i].double())
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                weights = logits.exp()
                sink = 0.0 if sinks is None else math.exp(sinks[b, g])
                sums[b, :seen] += weights / (weights.sum() + sink) / group
    return sums


@settings(deadline=None)
@given(
    batch=st.integers(1, 3),
    group=st.integers(1, 3),
    count=st.integers(1, 7),
    before=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    spare=st.integers(0, 4),
    size=st.integers(1, 5),
    softcap=st.sampled_from([0.0, 5.0]),
    sink=st.sampled_from([None, -2.0, 3.0]),
    garbage=st.sampled_from([math.nan, math.inf, 1e30]),
    limit=st.sampled_from([1, 30, 2**22]),
    seed=st.integers(0, 2**31),
)
def test_column_sums(batch, group, count, before, spare, size, softcap, sink, garbage, limit, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(before[:batch]) + count
    columns = int(lengths.max()) + spare
    queries = torch.randn(batch, group, count, size, generator=generator)
    keys = 3 * torch.randn(batch, columns, size, generator=generator)
    keys.masked_fill_((torch.arange(columns) >= lengths[:, None])[..., None], garbage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_kvevict.ops.torch.column_sums.LOGITS", limit)
        sinks = None if sink is None else sink + torch.randn(batch, group, generator=generator)
        sums = column_sums(queries, keys, lengths, size**-0.5, softcap, sinks)
    expected = spelled_out(queries, keys, lengths, size**-0.5, softcap, sinks)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-5)
    assert not bool(sums[torch.arange(columns) >= lengths[:, None]].any())


def test_no_attention_matrix_of_a_long_prompt_stands_in_memory(monkeypatch):
    """Blocks of queries: the largest logits are bounded, however many queries there are."""
    monkeypatch.setattr("vllm_kvevict.ops.torch.column_sums.LOGITS", 5000)
    largest = []
    matmul = torch.Tensor.__matmul__

    def recording(left, right):
        result = matmul(left, right)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", recording)
    lengths = torch.tensor([400, 400])
    sums = column_sums(torch.randn(2, 3, 400, 8), torch.randn(2, 400, 8), lengths, 0.3)
    assert max(largest) <= 5000 and len(largest) == 200
    torch.testing.assert_close(sums.sum(-1), torch.full((2,), 400.0))
