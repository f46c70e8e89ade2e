"""Batches over a latent cache, laid out for vLLM's CPU backend, against what is written by hand."""

from types import SimpleNamespace

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.latent import EvictingLatentImpl, _observed, over_stores
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule

BLOCK = 16
ROWS = torch.tensor([3, 0, 1, 2])


def batch(counts: list[int], lengths: list[int]) -> CommonAttentionMetadata:
    """Requests with ``counts`` new tokens of ``lengths``; block b of request r is 100 r + b."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    table = 100 * torch.arange(len(counts))[:, None] + torch.arange(-(-max(lengths) // BLOCK))
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths).int(),
        seq_lens_cpu_upper_bound=torch.tensor(lengths).int(),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=table.int(),
        slot_mapping=torch.arange(sum(counts)),
    )


def state() -> GroupState:
    rule = EvictionRule(BLOCK, 8, 64, budget_tokens=40)
    return GroupState(0, ["a", "b"], rule, 1, 4, 256, torch.device("cpu"))


def test_an_evicted_request_is_its_store_and_its_tail():
    evicted = state()
    evicted.record(0, 64, torch.tensor([7, 5]), torch.full((2, 1), 2))
    evicted.record(2, 32, torch.tensor([9]), torch.full((2, 1), 1))
    common = batch([1, 1, 1, 40], [50, 97, 33, 40])
    held = over_stores(common, evicted, ROWS)
    # Row 0 is the second request: blocks 0 to 3 gave way to two; row 2 the last one.
    assert held.seq_lens.tolist() == [50, 97 - 64 + 32, 33, 40 - 32 + 16]
    assert held.seq_lens_cpu_upper_bound.tolist() == held.seq_lens.tolist()
    tables = held.block_table_tensor.tolist()
    assert tables[0][:4] == [0, 1, 2, 3]
    assert tables[1][:5] == [7, 5, 104, 105, 106]
    assert tables[2][:3] == [200, 201, 202]
    assert tables[3][:2] == [9, 302]
    assert held.block_table_tensor.dtype == held.seq_lens.dtype == torch.int32
    assert torch.equal(held.slot_mapping, common.slot_mapping)
    evicted.clear([0, 2])
    assert over_stores(common, evicted, ROWS) is common


def test_queries_are_recorded_as_they_meet_the_cache():
    """A product with a key equals that with its latent entry, and the others are left alone."""
    heads, nope, rope, rank = 3, 8, 4, 16
    impl = EvictingLatentImpl.__new__(EvictingLatentImpl)
    impl.qk_nope_head_dim, impl.qk_rope_head_dim = nope, rope
    up = torch.randn(heads, nope, rank, dtype=torch.float64)
    impl.layer = SimpleNamespace(W_UK_T=up)
    query = torch.randn(5, heads, nope + rope, dtype=torch.float64)
    latent, pe = torch.randn(rank, dtype=torch.float64), torch.randn(rope, dtype=torch.float64)
    absorbed = impl._absorbed(query)
    for head in range(heads):
        key = torch.cat([up[head] @ latent, pe])
        expected = query[:, head] @ key
        assert torch.allclose(absorbed[:, head] @ torch.cat([latent, pe]), expected)

    tokens, entries = torch.tensor([1, 6, 7]), torch.tensor([10, 20, 30])
    metadata = SimpleNamespace(observation=(tokens, entries))
    assert _observed(SimpleNamespace(observation=None), 0, 9) is None
    assert _observed(metadata, 2, 3) is None
    assert [part.tolist() for part in _observed(metadata, 5, 3)] == [[1, 2], [20, 30]]
    assert [part.tolist() for part in _observed(metadata, 0, 7)] == [[1, 6], [10, 20]]
