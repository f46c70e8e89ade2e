"""The emulated CUDA kernels, and one rank, for tests of what runs evictions."""

import pytest

from tests.unit.ops.cuda.conftest import emulated, emulation  # noqa: F401
from vllm_kvevict.worker import eviction as eviction_pass
from vllm_kvevict.worker import fused as fused_pass


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor parallelism, and nothing of vLLM's that would say so."""
    monkeypatch.setattr(eviction_pass, "first_head", lambda num_heads: 0)
    for name in ("mean_of_ranks", "sum_of_ranks"):
        monkeypatch.setattr(eviction_pass, name, lambda tensor: tensor)
    monkeypatch.setattr(fused_pass, "sum_of_ranks", lambda tensor: tensor)
