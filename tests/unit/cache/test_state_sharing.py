"""Layers that read another layer's cache."""

import torch

from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule


def test_a_layer_without_a_cache_reads_its_owners_store():
    rule = EvictionRule(16, 4, 32, budget_tokens=36)
    sharing = {"l.5": "l.3", "l.7": "other"}
    state = GroupState(0, ["l.1", "l.3"], rule, 2, 3, 512, torch.device("cpu"), sharing=sharing)
    assert state.layer_index == {"l.1": 0, "l.3": 1, "l.5": 1}
    assert [state.owner(name) for name in ("l.1", "l.3", "l.5")] == ["l.1", "l.3", "l.3"]
    assert len(state.head_indptr) == len(state.layer_names) == 2
