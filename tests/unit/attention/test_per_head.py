"""Per-head batches: every (token, head) appears once, in the order its sequence wants."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule

BLOCK, HEADS, GROUP, SIZE = 4, 2, 3, 5


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=5).filter(
        lambda batch: any(evicted for _, evicted in batch)
    )
)
def test_queries_are_regrouped_and_put_back(lengths):
    counts = [count for count, _ in lengths]
    evicted = torch.tensor([flag for _, flag in lengths])
    requests = evicted.nonzero().flatten()
    state = GroupState(
        0, ["a"], EvictionRule(BLOCK, 1, 0, budget_tokens=5), HEADS, 8, 64, torch.device("cpu")
    )
    for row in requests.tolist():
        state.record(row, BLOCK, torch.tensor([row + 1]), torch.tensor([[1, 1]]))
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([BLOCK + count for count in counts], dtype=torch.int32),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=64,
        block_table_tensor=torch.zeros(len(counts), 16, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
    )
    batch = PerHeadBatch.build(common, state, requests, requests)
    tokens = torch.randn(sum(counts), HEADS * GROUP, SIZE)
    taken = batch.take(tokens)
    row = 0
    for sequence, (request, head) in enumerate(
        (request, head) for request in requests.tolist() for head in range(HEADS)
    ):
        assert batch.query_start_loc[sequence] == row
        for token in range(starts[request], starts[request + 1]):
            mine = tokens[token, head * GROUP : (head + 1) * GROUP]
            assert torch.equal(taken[row], mine)
            row += 1
    assert row == len(taken) == int(batch.query_start_loc[-1])

    apart = torch.zeros_like(tokens)
    for head, one in enumerate(batch.by_head):
        assert one.num_sequences == len(requests) == len(one.query_start_loc) - 1
        assert torch.equal(one.table, batch.table[:, head::HEADS])
        assert torch.equal(one.seq_lens, batch.seq_lens[:, head::HEADS])
        assert one.query_start_loc.diff().tolist() == [counts[r] for r in requests.tolist()]
        mine = one.take(tokens)
        assert len(mine) == int(one.query_start_loc[-1])
        one.put(apart, mine)

    output = torch.zeros_like(tokens)
    batch.put(output, taken)
    expected = tokens.clone()
    for request, flag in enumerate(evicted.tolist()):
        if not flag:
            expected[starts[request] : starts[request + 1]] = 0
    assert torch.equal(output, expected)
    assert torch.equal(apart, expected)
