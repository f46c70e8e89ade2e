"""Shares of a rank's heads: its own, or copies where ranks share a KV head."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.evict import BLOCK, HEADS, ROWS, run, steps, worker
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import StepPlan
from vllm_kvevict.worker.head_shares import by_group, rank_shares

ROW = [0.4, 0.8, 1.2, 1.6]


@pytest.mark.parametrize(
    "first, heads, copies, expected",
    [
        (0, 4, 4, ROW),
        (2, 2, 4, [1.2 / 1.4, 1.6 / 1.4]),
        (3, 1, 4, [1.0]),
        # Eight ranks of one head each: two hold every KV head.
        (5, 1, 8, [1.0]),
        (4, 4, 8, [1.2 / 1.4, 1.2 / 1.4, 1.6 / 1.4, 1.6 / 1.4]),
    ],
)
def test_a_rank_shares_out_the_pages_of_its_own_heads(first, heads, copies, expected):
    assert rank_shares(ROW, first, heads, copies) == pytest.approx(expected)


def test_layers_of_a_group_are_found_by_name():
    rule = EvictionRule(32, 32, 0, budget_tokens=128)
    device = torch.device("cpu")
    states = {
        7: GroupState(7, ["l.3", "l.1"], rule, 1, 2, 64, device),
        8: GroupState(8, ["l.2"], rule, 1, 2, 64, device),
    }
    shares = [[1.0, 3.0], [2.0, 1.0], [5.0, 1.0]]
    depths = {"l.1": 0, "l.2": 1, "l.3": 2}
    found = by_group(shares, depths, states, 1, 2)
    assert {group: tensor.tolist() for group, tensor in found.items()} == {
        7: [[1.0], [1.0]], 8: [[1.0]],
    }  # fmt: skip
    whole = {8: GroupState(8, ["l.2"], rule, 2, 2, 64, device)}
    assert by_group(shares, depths, whole, 0, 1)[8].tolist() == [[4 / 3, 2 / 3]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("policy, alike", [("tova", True), ("snapkv", False)])
def test_a_policy_that_averages_over_heads_gives_them_equal_pages(policy, alike):
    made = worker(policy, fused=False, shares=True)
    run(made, steps(policy))
    for state in made.states.values():
        pages = state.indptr(ROWS - 1).diff(dim=-1)
        assert bool((pages == pages[..., :1]).all()) is alike


@pytest.mark.usefixtures("one_rank")
def test_every_head_keeps_its_protected_tokens_whatever_its_share():
    """A head of a small share has a page of the budget in addition to those of protected tokens."""
    made, first = worker("snapkv", fused=False, shares=True), BLOCK + 3
    plan = steps("snapkv")[0]
    (eviction, *_) = plan.evictions
    group = replace(eviction.groups[0], store=[60, 61, 74, 77])
    records = []
    made.listeners.append(records.append)
    run(made, [StepPlan(evictions=[replace(eviction, groups=[group], protect_first=first)])])
    (record,) = records
    assert bool((record.pages >= 3).all()) and bool((record.pages.sum(-1) == 4 * HEADS).all())
    assert bool((record.pages != 4).any()), "shares divide the rest"
    for columns, pages in zip(record.columns, record.pages, strict=True):
        for kept in columns.split((pages * BLOCK).tolist()):
            assert kept[:first].tolist() == list(range(first))
