"""The emulated CUDA kernels, and one rank, for tests of what runs evictions."""

import pytest

from tests.unit.ops.cuda.conftest import emulated, emulation  # noqa: F401
from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import probes


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor parallelism, and nothing of vLLM's that would say so."""
    monkeypatch.setattr(reading, "first_head", lambda num_heads: 0)
    monkeypatch.setattr(reading, "mean_of_ranks", lambda tensor: tensor)
    for module in (reading, fused_pass, probes):
        monkeypatch.setattr(module, "sum_of_ranks", lambda tensor: tensor)
