"""One rank, for tests of workers that vLLM did not start."""

import pytest

from vllm_kvevict.worker import candidates as reading
from vllm_kvevict.worker import fused as fused_pass
from vllm_kvevict.worker import probes


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls that ask vLLM for its tensor-parallel group, which does not exist here."""
    monkeypatch.setattr(reading, "first_head", lambda num_heads: 0)
    monkeypatch.setattr(reading, "mean_of_ranks", lambda tensor: tensor)
    for module in (reading, fused_pass, probes):
        monkeypatch.setattr(module, "sum_of_ranks", lambda tensor: tensor)
