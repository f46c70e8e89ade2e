"""What a group remembers of evictions, entered one by one or all at once."""

import torch

from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule

LAYERS, HEADS, ROWS, BLOCK = 2, 3, 4, 16
TABLES = ("tail_start", "stores", "head_indptr", "evicted", "shorter", "weighted", "store")


def state() -> GroupState:
    rule = EvictionRule(BLOCK, 8, 64, budget_tokens=72)
    names = [f"layer.{index}" for index in range(LAYERS)]
    return GroupState(0, names, rule, HEADS, ROWS, 256, torch.device("cpu"))


def test_all_at_once_is_as_one_by_one():
    torch.manual_seed(0)
    single, together = state(), state()
    entered = [(2, 96, 3), (0, 160, 1), (3, 64, 2)]
    stores = torch.randint(1, 99, (3, 3), dtype=torch.int32)
    pages = torch.randint(1, 9, (3, LAYERS, HEADS), dtype=torch.int32)
    for index, (row, tail_start, blocks) in enumerate(entered):
        single.record(row, tail_start, stores[index, :blocks], pages[index].long())
        stores[index, blocks:] = 0
    rows, tails, _ = torch.tensor(entered).T
    together.record_all(entered, rows, tails, stores, pages)
    for table in TABLES:
        assert torch.equal(getattr(single, table), getattr(together, table)), table
    assert together.evicted.tolist() == [True, False, True, True]


def test_fewer_tokens_are_evicted_if_the_store_holds_more():
    """A store of one block of three heads: at most 3 * 16 tokens of one head, or 3 * 64."""
    for page_tokens, shorter in ((0, 160 - 48), (64, 0)):
        rule = EvictionRule(BLOCK, 8, 64, budget_tokens=72, page_tokens=page_tokens)
        made = GroupState(0, ["layer.0"], rule, HEADS, ROWS, 256, torch.device("cpu"))
        made.record(1, 160, torch.tensor([5]), torch.ones(1, HEADS, dtype=torch.int64))
        assert int(made.shorter[1]) == shorter


def test_only_the_evicted_are_forgotten():
    made = state()
    made.record(1, 96, torch.tensor([5]), torch.ones(LAYERS, HEADS, dtype=torch.int64))
    version = made.tail_start._version
    made.clear([0, 2])
    made.clear([])
    assert made.tail_start._version == version and made.tail_start.tolist() == [0, 96, 0, 0]
    made.clear([0, 1])
    assert not made.tail_start.any() and not made.evicted.any()
    assert not made.indptr(1).any()


def test_a_row_forgets_that_its_store_was_weighted():
    made = state()
    made.record(1, 96, torch.tensor([5]), torch.ones(LAYERS, HEADS, dtype=torch.int64), True)
    made.record(2, 96, torch.tensor([6]), torch.ones(LAYERS, HEADS, dtype=torch.int64), True)
    made.clear([1])
    assert made.weighted.tolist() == [False, False, True, False]
