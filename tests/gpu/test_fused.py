"""Evictions by the CUDA kernels on a GPU, against the PyTorch operations on the CPU."""

from typing import Any

import pytest
import torch

from tests.kernels.evict import KINDS, assert_same, run, steps, stored_steps, worker
from vllm_kvevict.ops.cuda.extension import is_built
from vllm_kvevict.ops.token_format import AS_CACHED, INT4, INT8, TokenFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not is_built(), reason="needs the extension: docs/dev/kernels.md, Building"),
]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("shares", [False, True], ids=["", "shares"])
@pytest.mark.parametrize(("policy", "networks"), KINDS)
def test_same_caches_and_tables_without_waiting(policy, networks, shares, head_size, fp8):
    """Bit by bit, but for the floats of tokens: :func:`tests.kernels.evict.assert_same`.

    Sums run in another order there, so a near-tie would fall the other way.
    """
    options = dict(head_size=head_size, fp8=fp8, shares=shares, networks=networks)
    check(policy, options)


@pytest.mark.parametrize("stored", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("policy", "networks"), KINDS)
def test_stores_in_few_bits(policy, networks, head_size, stored):
    check(policy, dict(head_size=head_size, networks=networks, stored=stored), stored)


def check(policy: str, options: dict[str, Any], stored: TokenFormat = AS_CACHED) -> None:
    plain = worker(policy, fused=False, **options)
    fused = worker(policy, fused=True, device="cuda", **options)
    plans = steps(policy) if stored.as_cached else stored_steps(policy)
    run(plain, plans)
    run(worker(policy, fused=True, device="cuda", **options), plans)  # loads the extension
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(fused, plans)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fused.evictions == plain.evictions == 4
    assert_same(fused, plain, off=0.0 if stored.as_cached else 1e-4)
