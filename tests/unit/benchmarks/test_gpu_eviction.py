"""The eviction pass that is timed on a GPU, on the CPU."""

from argparse import Namespace

import pytest
import torch

from benchmarks.gpu import eviction
from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import probes as probing


def small(policy: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Options of a small pass on one rank."""
    for module in (reading, fused_pass, probing):
        monkeypatch.setattr(module, "sum_of_ranks", None)
    monkeypatch.setattr(reading, "first_head", None)
    return Namespace(
        block_size=16, budget=48, window=16, heads=2, group=2, head_size=64, layers=2,
        dtype="float32", policy=policy,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["ada-snapkv", "ada-defensive", "ada-probe"])
def test_the_timed_pass_evicts(policy, monkeypatch):
    args = small(policy, monkeypatch)
    case = eviction.Pass(200, args, torch.device("cpu"))
    before = case.caches[0].clone()
    run = case.worker(fused=False)
    run()
    changed = (case.caches[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(case.due.store)


def test_a_pass_without_networks_keeps_other_tokens(monkeypatch):
    """The benchmark takes the time of the networks as the difference of two passes. The second one
    must leave the networks out."""
    args = small("ada-probe", monkeypatch)
    kept = []
    for networks in (True, True, False):
        torch.manual_seed(0)
        case = eviction.Pass(200, args, torch.device("cpu"))
        case.worker(fused=False, networks=networks)()
        kept.append(case.caches[0])
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
