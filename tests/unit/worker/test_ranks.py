"""What two tensor-parallel ranks tell each other, each in a process of its own."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from tests import forked
from vllm_kvevict.worker import ranks

LOST = ({3, 5}, {5, 8}), (set[int](), {7}), (set[int](), set[int]())
"""What the first and the second rank could not load, in three steps."""


def exchanged(rank: int, meeting: Path) -> dict[str, Any]:
    """What this rank gets from all."""
    # vLLM's CPU worker sets it, and its communicator names its shared memory after it.
    os.environ["VLLM_DIST_IDENT"] = meeting.name
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(2, backend="gloo")
    own = torch.tensor([1.0, 10.0]) * (1 + rank)
    return dict(
        lost=[ranks.union_of_ranks(lost[rank]) for lost in LOST],
        held=ranks.on_all_ranks([True, rank == 0, rank == 1, False]),
        sums=ranks.sum_of_ranks(own.clone()).tolist(),
        means=ranks.mean_of_ranks(own.clone()).tolist(),
        every=ranks.of_ranks(own).tolist(),
        first_head=ranks.first_head(4),
    )


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Path]:
    """Yield a path with a unique name, and remove shared memory of that name afterwards."""
    name = f"meeting-{uuid.uuid4().hex}"
    yield tmp_path / name
    # A pool terminates its processes, so that vLLM does not remove it.
    for left in Path("/dev/shm").glob(f"{name}*"):
        left.unlink()


def test_both_ranks_get_what_either_has(meeting: Path) -> None:
    with forked.context().Pool(2) as pool:
        asked = [(rank, meeting) for rank in range(2)]
        found = pool.starmap_async(exchanged, asked, chunksize=1).get(timeout=120)
    expected = dict(
        lost=[{3, 5, 8}, {7}, set()],
        held=[True, False, False, False],
        sums=[3.0, 30.0],
        means=[1.5, 15.0],
        every=[[1.0, 10.0], [2.0, 20.0]],
    )
    assert found == [expected | dict(first_head=first) for first in (0, 4)]
