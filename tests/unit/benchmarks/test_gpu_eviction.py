"""The eviction pass that is timed on a GPU, on the CPU."""

from argparse import Namespace

import pytest
import torch

from benchmarks.gpu import eviction
from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import probes as probing


@pytest.mark.parametrize("policy", ["ada-snapkv", "ada-defensive", "ada-probe"])
def test_the_timed_pass_evicts(policy, monkeypatch):
    for module in (reading, fused_pass, probing):
        monkeypatch.setattr(module, "sum_of_ranks", None)
    monkeypatch.setattr(reading, "first_head", None)
    args = Namespace(
        block_size=16, budget=48, window=16, heads=2, group=2, head_size=64, layers=2,
        dtype="float32", policy=policy,
    )  # fmt: skip
    case = eviction.Pass(200, args, torch.device("cpu"))
    before = case.caches[0].clone()
    run = case.worker(fused=False)
    run()
    changed = (case.caches[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(case.due.store)
